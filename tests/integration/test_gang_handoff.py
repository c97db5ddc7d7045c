"""Real models of several ranks, prefill and decode apart: equal ranks are bitwise, unequal ones say the same."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request
from pdserve.router.replay import Replayer
from pdserve.workers.worker import Worker
from support.checkpoints import FAMILIES
from support.controllers import StubController
from support.engines import make_engine, make_request, prompts_of, run
from support.gangs import ThreadGang, running_gang
from support.oracle import assert_greedy, oracle
from support.pairs import Pair, assert_clean, has_link
from support.services import CHANNEL, eventually, generate, running_controller, running_replayer, running_worker

LENGTHS = (1, 16, 33, 70, 110)
NUM_TOKENS = 16
BLOCK_SIZE = 16
WAIT_S = 10.0


@asynccontextmanager
async def running_gang_worker(
    controller: StubController, name: str, folder: Path, num_ranks: int, transfer: TransferConfig, **settings: object
) -> AsyncIterator[Worker]:
    """A worker of a real model on several ranks."""
    ranks = ThreadGang()
    with running_gang(folder, num_ranks, on_step=ranks.announcing, **settings) as gang:
        ranks.attach(gang, CHANNEL, transfer, SystemClock())
        worker = running_worker(
            controller,
            gang.assembled.engine,
            name,
            stores=[gang.assembled.store],
            transfer=transfer,
            gang=ranks if num_ranks > 1 else None,
        )
        try:
            async with worker as started:
                yield started
        finally:
            await ranks.stop()


@asynccontextmanager
async def running_gangs(
    folder: Path,
    prefill_ranks: int,
    decode_ranks: int,
    transport: TransportKind = TransportKind.SHM,
    of_decode: Mapping[str, object] | None = None,
    **settings: object,
) -> AsyncIterator[Pair]:
    """A prefill and a decode worker that are linked; `of_decode` are settings of the second only."""
    transfer = TransferConfig(transports=(transport,), slot_bytes=64 << 10)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        controller = await enter(running_controller())
        replayer: Replayer = await enter(running_replayer(controller))
        workers = [
            await enter(running_gang_worker(controller, name, folder, num_ranks, transfer, **settings, **more))
            for name, num_ranks, more in (
                ("prefill-0", prefill_ranks, {}),
                ("decode-0", decode_ranks, of_decode or {}),
            )
        ]
        await eventually(lambda: replayer.dispatcher.has_worker and has_link(workers[1]), "connected")
        yield Pair(controller, replayer, *workers)


def draw_requests() -> list[Request]:
    """Half of them draw."""
    return [
        make_request(f"r{n}", prompt, max_tokens=NUM_TOKENS, temperature=0.9 if n % 2 else 0.0, seed=n)
        for n, prompt in enumerate(prompts_of(LENGTHS))
    ]


async def texts_of(pair: Pair, requests: list[Request]) -> dict[str, list[int]]:
    texts = {str(request.request_id): (await generate(pair.replayer, request))[0] for request in requests}
    # The prompts were computed by the prefill worker: the decode worker computed none itself.
    assert pair.decode.load().num_prefilled_tokens == 0
    await assert_clean(pair.prefill, pair.decode)
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
async def test_apart_has_the_text_of_together(
    shared_checkpoints: Callable[[str], Path], family: str, num_ranks: int
) -> None:
    folder, requests = shared_checkpoints(family), draw_requests()
    with running_gang(folder, num_ranks) as gang:
        together = run(gang.assembled.engine, requests)
    async with running_gangs(folder, num_ranks, num_ranks) as pair:
        # Bitwise: what is drawn follows the bits.
        assert await texts_of(pair, requests) == together


@pytest.mark.parametrize(
    ("family", "ranks", "transport"),
    [
        ("llama", (1, 2), TransportKind.SHM),
        ("llama", (2, 1), TransportKind.TCP),
        ("gemma3", (2, 1), TransportKind.SHM),
        ("gemma3", (1, 2), TransportKind.TCP),
        ("qwen3_moe", (4, 2), TransportKind.SHM),
        ("gpt_oss", (2, 4), TransportKind.NIXL),
        ("mistral", (1, 4), TransportKind.TORCH_DIST),
    ],
)
async def test_unequal_ranks_say_what_one_rank_says(
    shared_checkpoints: Callable[[str], Path], family: str, ranks: tuple[int, int], transport: TransportKind
) -> None:
    folder = shared_checkpoints(family)
    requests = [request for request in draw_requests() if request.sampling.temperature == 0.0]
    expected, model = run(make_engine(folder).engine, requests), oracle(folder)
    async with running_gangs(folder, *ranks, transport) as pair:
        for name, tokens in (await texts_of(pair, requests)).items():
            if tokens != expected[name]:
                prompt = next(request.prompt_token_ids for request in requests if request.request_id == name)
                assert_greedy(model, list(prompt), tokens)


async def test_a_request_that_waits_for_blocks_which_ranks_copy_is_admitted(
    shared_checkpoints: Callable[[str], Path],
) -> None:
    # The last blocks come back when an idle worker settles its copies: a turn without a step.
    folder = shared_checkpoints("llama")
    settings = {"kv_memory_gib": 0.00095, "host_memory_gib": 0.004, "max_batch_tokens": 64, "max_running": 8}
    async with running_gangs(folder, 1, 2, of_decode=settings) as pair:
        num_tokens = pair.decode.load().num_blocks * BLOCK_SIZE
        short, long = prompts_of((31, num_tokens - 2))
        first = asyncio.create_task(generate(pair.replayer, make_request("short", short, max_tokens=18)))
        await eventually(lambda: pair.decode.load().num_running > 0, "the short one runs")
        second = asyncio.create_task(generate(pair.replayer, make_request("long", long, max_tokens=2)))
        await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)
        assert pair.decode.load().num_prefilled_tokens == 0, "the second one came over the link"
        await assert_clean(pair.prefill, pair.decode)


async def test_converted_rows_of_gangs_are_right(shared_checkpoints: Callable[[str], Path]) -> None:
    # The sink's ranks hold int8 rows in larger blocks, apart and together.
    folder, requests = shared_checkpoints("llama"), draw_requests()
    settings = {"kv_dtype": KVDtype.INT8, "block_size": 32, "linear": LinearKind.FP16}
    with running_gang(folder, 2, **settings) as gang:
        together = run(gang.assembled.engine, requests)
    async with running_gangs(folder, 2, 2, **settings) as pair:
        assert await texts_of(pair, requests) == together
