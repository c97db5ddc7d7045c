"""A prefill and a decode worker on the digest model, over real channels and transports, in one event loop."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.router.replay import Replayer
from pdserve.workers.engine.engine import Engine
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.worker import Worker
from support.controllers import StubController
from support.services import MODEL, eventually, running_controller, running_replayer, running_worker

LAYER_BYTES = MODEL.layout(16).token_bytes * 2
"""Bytes of a token in both layers of a group."""


@dataclass
class Pair:
    """One prefill and one decode worker, and what an ingress runs on."""

    controller: StubController
    replayer: Replayer
    prefill: Worker
    decode: Worker


def transfer_config(transport: TransportKind, **changes: float) -> TransferConfig:
    """Return a configuration with small slots and one transport."""
    return TransferConfig(transports=(transport,), slot_bytes=64 << 10, **changes)  # type: ignore[arg-type]


def has_link(worker: Worker) -> bool:
    """True if every link of the decode worker is open."""
    links = worker.load().links
    return bool(links) and all(link.state == "open" for link in links)


def received_bytes(worker: Worker) -> int:
    """Return the bytes that a decode worker's links have brought."""
    return sum(link.num_bytes for link in worker.load().links)


@asynccontextmanager
async def running_pair(
    transfer: TransferConfig,
    *,
    prefill: Engine | None = None,
    decode: Engine | None = None,
    make_copier: Callable[[KVStore], BlockCopier] = BlockCopier,
    make_source_copier: Callable[[KVStore], BlockCopier] = BlockCopier,
    stores: tuple[KVStore, KVStore] | None = None,
) -> AsyncIterator[Pair]:
    """A pair that is linked; `make_copier` is for the decode worker; `stores` are those of real models."""
    source_stores, sink_stores = ((), ()) if stores is None else ((stores[0],), (stores[1],))
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(
            controller,
            prefill,
            "prefill-0",
            transfer=transfer,
            make_copier=make_source_copier,
            stores=source_stores,
        ) as prefill_worker,
        running_worker(
            controller, decode, "decode-0", transfer=transfer, make_copier=make_copier, stores=sink_stores
        ) as decode_worker,
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
        assert worker._engine.pool.is_all_free
