"""Prefill and decode apart, on the digest model, over real channels and real transports, in one event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.request import FinishReason
from pdserve.router.replay import Replayer
from pdserve.workers.engine.engine import Engine
from pdserve.workers.worker import Worker
from support.controllers import StubController
from support.engines import make_request, prompts_of
from support.services import MODEL, eventually, generate, running_controller, running_replayer, running_worker

TRANSPORTS = list(TransportKind)


@dataclass
class Pair:
    """One prefill and one decode worker, and what an ingress runs on."""

    controller: StubController
    replayer: Replayer
    prefill: Worker
    decode: Worker


def transfer_config(transport: TransportKind, **changes: float) -> TransferConfig:
    return TransferConfig(transports=(transport,), slot_bytes=64 << 10, **changes)  # type: ignore[arg-type]


def has_link(worker: Worker) -> bool:
    return any(link.state == "open" for link in worker.load().links)


@asynccontextmanager
async def running_pair(
    transfer: TransferConfig, *, prefill: Engine | None = None, decode: Engine | None = None
) -> AsyncIterator[Pair]:
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, prefill, "prefill-0", transfer=transfer) as prefill_worker,
        running_worker(controller, decode, "decode-0", transfer=transfer) as decode_worker,
    ):
        await eventually(lambda: replayer.dispatcher.has_worker and has_link(decode_worker), "connected")
        yield Pair(controller, replayer, prefill_worker, decode_worker)


async def assert_clean(*workers: Worker) -> None:
    """LEAK check (I16)."""

    def is_clean(worker: Worker) -> bool:
        load = worker.load()
        return (
            worker.num_live == 0
            and (load.num_running, load.num_waiting, load.num_queued_prompt_tokens) == (0, 0, 0)
            and load.num_free_blocks == load.num_blocks
            and worker.has_idle_handoff
        )

    for worker in workers:
        await eventually(lambda worker=worker: is_clean(worker), f"clean: {worker.load()}")
        worker._engine.scheduler.validate()
        assert worker._engine.pool.num_promised == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_texts_equal_those_of_one_engine(transport: TransportKind) -> None:
    lengths: Sequence[int] = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200, 300)
    requests = [
        make_request(str(n), prompt, max_tokens=1 + n % 9, temperature=n % 2, seed=n)
        for n, prompt in enumerate(prompts_of(lengths))
    ]
    async with running_pair(transfer_config(transport)) as pair:
        results = await asyncio.gather(*(generate(pair.replayer, request) for request in requests))
        for request, (tokens, reason) in zip(requests, results, strict=True):
            assert tokens == MODEL.generate(request), request.request_id
            assert reason is FinishReason.LENGTH
        assert pair.prefill.load().num_prefilled_tokens == sum(lengths)
        assert pair.decode.load().num_prefilled_tokens == 0
        await assert_clean(pair.prefill, pair.decode)
