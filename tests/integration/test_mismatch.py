"""Prefill and decode workers that hold their KV differently: ranks, block sizes, dtypes, all with windows.

Text of the digest model does not depend on how KV is held, so any misplaced head, token or value changes it.
"""

import asyncio
from dataclasses import dataclass

import pytest

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.kv_layout import CONVERTED, KVDtype
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.engine import Engine
from pdserve.workers.model.digest import DigestModel
from support.engines import make_digest_engine, make_request, prompts_of
from support.pairs import assert_clean, received_bytes, running_pair, transfer_config
from support.services import generate

LENGTHS = (1, 15, 16, 17, 31, 33, 49, 64, 65, 130, 200)


@dataclass(frozen=True, slots=True)
class Held:
    """How a worker holds the KV."""

    tp_size: int = 1
    block_size: int = 16
    kv_dtype: KVDtype = KVDtype.FLOAT32

    def __str__(self) -> str:
        return f"tp{self.tp_size}-b{self.block_size}-{self.kv_dtype}"


def make_held_engine(held: Held, num_heads: int) -> Engine:
    model = DigestModel(num_heads=num_heads, tp_size=held.tp_size, kv_dtype=held.kv_dtype)
    return make_digest_engine(model, block_size=held.block_size, num_blocks=2048 // held.block_size)


def make_requests(suffix: str = "") -> list[Request]:
    return [
        make_request(f"{length}{suffix}", prompt, max_tokens=1 + length % 6, temperature=length % 2, seed=length)
        for length, prompt in zip(LENGTHS, prompts_of(LENGTHS), strict=True)
    ]


async def check_pair(source: Held, sink: Held, num_heads: int, transport: TransportKind) -> None:
    """Serve prompts twice, the second time with a prefix cache on both sides; check texts, bytes and pools."""
    plain = DigestModel(num_heads=num_heads)
    prefill, decode = make_held_engine(source, num_heads), make_held_engine(sink, num_heads)
    async with running_pair(transfer_config(transport), prefill=prefill, decode=decode) as pair:
        requests = make_requests()
        results = await asyncio.gather(*(generate(pair.replayer, request) for request in requests))
        for request, (tokens, _) in zip(requests, results, strict=True):
            assert tokens == plain.generate(request), request.request_id
        assert pair.decode.load().num_prefilled_tokens == 0
        layout = decode.runner.stores[0].layout  # type: ignore[attr-defined]
        wire_row = min(held.kv_dtype.row_bytes(layout.head_dim) for held in (source, sink))
        num_held_heads = sum(end - first for first, end in map(layout.heads_of, range(layout.tp_size)))
        num_sent = sum(
            length - max(0, group.first_needed(length - 1))
            for request in requests
            if request.sampling.max_tokens > 1
            for group in layout.groups
            for length in [len(request.prompt_token_ids)]
            for _ in group.layers
        )
        # Each head goes to each rank that holds it, once.
        assert received_bytes(pair.decode) == num_sent * 2 * num_held_heads * wire_row
        for request in make_requests(" again"):
            assert (await generate(pair.replayer, request))[0] == plain.generate(request), request.request_id
        await assert_clean(pair.prefill, pair.decode)


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize(("source_ranks", "sink_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4)])
async def test_ranks_differ(source_ranks: int, sink_ranks: int, num_heads: int) -> None:
    # known_faults B067, B068; I8, I9
    await check_pair(Held(tp_size=source_ranks), Held(tp_size=sink_ranks), num_heads, TransportKind.SHM)


@pytest.mark.parametrize("source_size", [16, 32, 64])
@pytest.mark.parametrize("sink_size", [16, 32, 64])
async def test_block_sizes_differ(source_size: int, sink_size: int) -> None:
    # known_faults B069
    await check_pair(Held(block_size=source_size), Held(block_size=sink_size), 2, TransportKind.TCP)


@pytest.mark.parametrize("source_dtype", sorted(CONVERTED))
@pytest.mark.parametrize("sink_dtype", sorted(CONVERTED))
async def test_dtypes_differ(source_dtype: KVDtype, sink_dtype: KVDtype) -> None:
    await check_pair(Held(kv_dtype=source_dtype), Held(kv_dtype=sink_dtype), 2, TransportKind.SHM)


@pytest.mark.parametrize("transport", TransportKind)
async def test_everything_differs_at_once(transport: TransportKind) -> None:
    await check_pair(
        Held(tp_size=2, block_size=64, kv_dtype=KVDtype.FLOAT32),
        Held(tp_size=4, block_size=16, kv_dtype=KVDtype.INT8),
        2,
        transport,
    )
    await check_pair(
        Held(tp_size=4, block_size=16, kv_dtype=KVDtype.INT8),
        Held(tp_size=1, block_size=32, kv_dtype=KVDtype.FLOAT16),
        2,
        transport,
    )


async def test_a_pair_of_different_dtypes_says_that_it_is_of_the_tolerance_class() -> None:
    prefill, decode = make_held_engine(Held(), 2), make_held_engine(Held(kv_dtype=KVDtype.INT8), 2)
    async with running_pair(transfer_config(TransportKind.SHM), prefill=prefill, decode=decode) as pair:
        (link,) = pair.decode.load().links
        assert link.note == "tolerance class: kv_dtype float32 there, int8 here"
