"""Disaggregated = colocated, bit by bit, on real models over both transports."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import FinishReason, Request
from pdserve.workers.assembly import AssembledEngine
from support.bits import KINDS, Logits, alone, assert_same_bits, make_seeded_requests, recording_engine, with_kv
from support.checkpoints import FAMILIES
from support.engines import make_engine, make_request, prompts_of
from support.services import eventually, generate, running_controller, running_replayer, running_worker


async def run_apart(
    assembled: AssembledEngine,
    requests: list[Request],
    transport: TransportKind,
    *,
    chunk: int,
    block_size: int,
    sink_block_size: int | None = None,
    sink_assembled: AssembledEngine | None = None,
) -> tuple[Logits, dict[str, list[int]]]:
    """Run requests on a prefill and a decode worker; return the logits that either drew from, and the texts."""
    transfer = TransferConfig(transports=(transport,), slot_bytes=64 << 10)
    prefill, prefill_runner, prefill_store = recording_engine(
        assembled, max_batch_tokens=chunk, block_size=block_size, num_blocks=160
    )
    decode, decode_runner, decode_store = recording_engine(
        sink_assembled or assembled, block_size=sink_block_size or block_size, num_blocks=160
    )
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, prefill, "prefill-0", stores=(prefill_store,), transfer=transfer) as source,
        running_worker(controller, decode, "decode-0", stores=(decode_store,), transfer=transfer) as sink,
    ):
        await eventually(lambda: any(link.state == "open" for link in sink.load().links), "linked")
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        results = await asyncio.gather(*(generate(replayer, request) for request in requests))
        assert sink.load().num_prefilled_tokens == 0
        assert source.load().num_prefilled_tokens == sum(len(request.prompt_token_ids) for request in requests)
    assert all(reason is FinishReason.LENGTH for _, reason in results)
    assert not prefill_runner.logits.keys() & decode_runner.logits.keys()
    texts = {str(request.request_id): tokens for request, (tokens, _) in zip(requests, results, strict=True)}
    return {**prefill_runner.logits, **decode_runner.logits}, texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("linear", "kv_dtype"), KINDS)
async def test_a_request_has_the_same_bits_disaggregated(
    tiny_checkpoints: dict[str, Path], family: str, linear: LinearKind, kv_dtype: KVDtype
) -> None:
    assembled = make_engine(tiny_checkpoints[family], linear=linear, kv_dtype=kv_dtype)
    requests = make_seeded_requests()
    expected, texts = alone(assembled, requests)
    for transport, chunk, block_size in ((TransportKind.SHM, 33, 16), (TransportKind.TCP, 512, 32)):
        found, found_texts = await run_apart(assembled, requests, transport, chunk=chunk, block_size=block_size)
        assert_same_bits(found, expected)
        assert found_texts == texts


async def test_odd_widths_have_the_same_bits_disaggregated(odd_checkpoint: Path) -> None:
    assembled = make_engine(odd_checkpoint, linear=LinearKind.FP16)
    requests = make_seeded_requests()
    expected, texts = alone(assembled, requests)
    found, found_texts = await run_apart(assembled, requests, TransportKind.SHM, chunk=29, block_size=48)
    assert_same_bits(found, expected)
    assert found_texts == texts


@pytest.mark.parametrize(("source_size", "sink_size"), [(16, 32), (64, 16), (32, 64)])
async def test_block_sizes_that_differ_leave_the_same_bits(
    tiny_checkpoints: dict[str, Path], source_size: int, sink_size: int
) -> None:
    # known_faults B069
    assembled = make_engine(tiny_checkpoints["gemma3"], linear=LinearKind.FP32)
    requests = make_seeded_requests()
    expected, texts = alone(assembled, requests)
    found, found_texts = await run_apart(
        assembled, requests, TransportKind.SHM, chunk=33, block_size=source_size, sink_block_size=sink_size
    )
    assert_same_bits(found, expected)
    assert found_texts == texts


@pytest.mark.parametrize(
    ("source_dtype", "sink_dtype", "bound"),
    [
        (KVDtype.FLOAT32, KVDtype.FLOAT16, 0.005),
        (KVDtype.FLOAT16, KVDtype.FLOAT32, 0.005),
        (KVDtype.FLOAT32, KVDtype.INT8, 0.06),
        (KVDtype.INT8, KVDtype.FLOAT16, 0.06),
    ],
)
async def test_dtypes_that_differ_are_of_the_tolerance_class(
    tiny_checkpoints: dict[str, Path], source_dtype: KVDtype, sink_dtype: KVDtype, bound: float
) -> None:
    # The second token of each request is drawn from KV that was converted on the way, after the same first one.
    plain = make_engine(tiny_checkpoints["gemma3"], linear=LinearKind.FP32)
    requests = make_seeded_requests(max_tokens=2)
    found, texts = await run_apart(
        with_kv(plain, source_dtype),
        requests,
        TransportKind.TCP,
        chunk=33,
        block_size=16,
        sink_assembled=with_kv(plain, sink_dtype),
    )
    for request in requests:
        seed, first_token = request.sampling.seed, texts[request.request_id][0]
        resumed = replace(request, resume_token_ids=(first_token,))
        expected, _ = alone(plain, [resumed])
        wanted = expected[seed, 1]
        error = np.abs(found[seed, 1] - wanted).max() / wanted.std()
        assert error < bound, (request.request_id, error)


@pytest.mark.parametrize(
    ("transport", "kv_dtype"),
    [(TransportKind.SHM, KVDtype.FLOAT32), (TransportKind.TCP, KVDtype.INT8)],
)
async def test_the_demo_model_has_the_same_bits_disaggregated(
    demo_models: Callable[[LinearKind], AssembledEngine], transport: TransportKind, kv_dtype: KVDtype
) -> None:
    assembled = with_kv(demo_models(LinearKind.FP16), kv_dtype)
    requests = [
        make_request(str(seed), prompt, temperature=0.9, seed=seed, max_tokens=4)
        for seed, prompt in enumerate(prompts_of((5, 40, 600), vocab_size=200000), start=1)
    ]
    expected, texts = alone(assembled, requests)
    found, found_texts = await run_apart(assembled, requests, transport, chunk=128, block_size=16)
    assert_same_bits(found, expected)
    assert found_texts == texts
