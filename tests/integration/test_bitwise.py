"""The bitwise class: a request's logits and text depend on the request and its seed alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.assembly import AssembledEngine
from pdserve.workers.engine.strategies import Fair, Priority, ShortestPrefill, Strategy
from support.bits import KINDS, alone, assert_same_bits, make_seeded_requests, record, recording_engine, with_kv
from support.checkpoints import FAMILIES
from support.engines import make_engine, make_request, prompts_of, run

CHUNKS = (1, 2, 7, 16, 33, 64, 512)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("linear", "kv_dtype"), KINDS)
def test_logits_have_the_same_bits_in_any_batch(
    tiny_checkpoints: dict[str, Path], family: str, linear: LinearKind, kv_dtype: KVDtype
) -> None:
    assembled = make_engine(tiny_checkpoints[family], linear=linear, kv_dtype=kv_dtype, threads=2)
    assert assembled.numerics.numerics_class is NumericsClass.BITWISE, assembled.numerics.note
    requests = make_seeded_requests()
    expected, texts = alone(assembled, requests)
    rng = random.Random(family + linear)
    for chunk in CHUNKS:
        order = rng.sample(requests, len(requests))
        found, found_texts, _ = record(
            assembled,
            order,
            block_size=rng.choice((16, 32)),
            max_batch_tokens=chunk,
            max_running=rng.choice((2, 5, 64)),
            threads=rng.choice((1, 2)),
        )
        assert_same_bits(found, expected)
        assert found_texts == texts


@pytest.mark.parametrize(
    ("family", "kv_dtype"), [("qwen3", KVDtype.FLOAT32), ("gemma3", KVDtype.FLOAT32), ("gemma3", KVDtype.INT8)]
)
@pytest.mark.parametrize(
    ("is_swapped", "limits"), [(False, {"has_prefix_cache": False}), (False, {}), (True, {"host_blocks": 200})]
)
def test_preemption_changes_no_bit(
    tiny_checkpoints: dict[str, Path], family: str, kv_dtype: KVDtype, is_swapped: bool, limits: dict[str, int]
) -> None:
    # Recomputed, taken over from what is still cached, and swapped.
    assembled = make_engine(tiny_checkpoints[family], kv_dtype=kv_dtype)
    requests = make_seeded_requests((14, 20, 31, 40), max_tokens=50)
    expected, texts = alone(assembled, requests)
    found, found_texts, engine = record(assembled, requests, num_blocks=14, max_batch_tokens=48, **limits)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.host is not None and engine.host.num_loaded_blocks > 0) == is_swapped
    assert_same_bits(found, expected)
    assert found_texts == texts


@pytest.mark.parametrize(
    ("family", "kv_dtype"), [("llama", KVDtype.FLOAT32), ("llama", KVDtype.INT8), ("gemma3", KVDtype.FLOAT32)]
)
@pytest.mark.parametrize("num_blocks", [96, 16])
def test_cached_prefixes_change_no_bit(
    tiny_checkpoints: dict[str, Path], family: str, kv_dtype: KVDtype, num_blocks: int
) -> None:
    # Prompts that begin alike, one after the other and together; in the small pool blocks are evicted between.
    assembled = make_engine(tiny_checkpoints[family], kv_dtype=kv_dtype)
    text = prompts_of([150])[0]
    requests = [
        make_request(str(seed), text[:length], temperature=0.9, seed=seed, max_tokens=10)
        for seed, length in enumerate((150, 150, 33, 64, 65, 149, 20, 150), start=1)
    ]
    expected, texts = alone(assembled, requests)
    engine, runner, _ = recording_engine(assembled, num_blocks=num_blocks, max_batch_tokens=37)
    found_texts: dict[str, list[int]] = {}
    for batch in (requests[:1], requests[1:2], requests[2:]):
        found_texts |= run(engine, batch)
    assert engine.scheduler.num_cached_prompt_tokens > 144
    assert_same_bits(runner.logits, expected)
    assert found_texts == texts


@pytest.mark.parametrize("make_strategy", [Priority, lambda: ShortestPrefill(20.0), lambda: Fair({"a": 2.0})])
def test_no_strategy_changes_a_bit(tiny_checkpoints: dict[str, Path], make_strategy: Callable[[], Strategy]) -> None:
    # In a pool that is too small, so that sequences are put back, each in the strategy's order.
    assembled = make_engine(tiny_checkpoints["gemma3"])
    requests = [
        replace(request, priority=-number, tenant="ab"[number % 2])
        for number, request in enumerate(make_seeded_requests((14, 20, 31, 40), max_tokens=50))
    ]
    expected, texts = alone(assembled, requests)
    found, found_texts, engine = record(assembled, requests, make_strategy(), num_blocks=14, max_batch_tokens=48)
    assert engine.scheduler.num_preemptions > 0
    assert_same_bits(found, expected)
    assert found_texts == texts


def test_odd_widths_have_the_same_bits(odd_checkpoint: Path) -> None:
    assembled = make_engine(odd_checkpoint, linear=LinearKind.FP16, threads=2)
    requests = make_seeded_requests()
    expected, _ = alone(assembled, requests)
    found, _, _ = record(assembled, requests, max_batch_tokens=29, block_size=48, threads=2)
    assert_same_bits(found, expected)


@pytest.mark.parametrize(("linear", "kv_dtype"), KINDS)
def test_the_demo_model_has_the_same_bits_in_any_batch(
    demo_models: Callable[[LinearKind], AssembledEngine], linear: LinearKind, kv_dtype: KVDtype
) -> None:
    assembled = with_kv(demo_models(linear), kv_dtype)
    assert assembled.numerics.numerics_class is NumericsClass.BITWISE, assembled.numerics.note
    # Past the window of 512 for the default kind; the others differ from it in their products only.
    longest = 600 if linear is LinearKind.FP16 else 130
    requests = [
        make_request(str(seed), prompt, temperature=0.9, seed=seed, max_tokens=4)
        for seed, prompt in enumerate(prompts_of((5, 40, longest), vocab_size=200000), start=1)
    ]
    expected, texts = alone(assembled, requests)
    for block_size, chunk, threads in ((32, 33, 1), (16, 512, 2)):
        found, found_texts, _ = record(
            assembled, requests[::-1], block_size=block_size, max_batch_tokens=chunk, threads=threads
        )
        assert_same_bits(found, expected)
        assert found_texts == texts


def test_two_loads_have_equal_digests_and_another_seed_has_not(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from support.checkpoints import save_checkpoint

    first, second = make_engine(tiny_checkpoints["qwen2"]), make_engine(tiny_checkpoints["qwen2"], threads=2)
    other = make_engine(save_checkpoint(tmp_path / "other", "qwen2", seed=1))
    assert first.numerics.digest == second.numerics.digest
    assert first.model.digest == second.model.digest
    assert other.numerics.digest != first.numerics.digest
    assert other.model.digest != first.model.digest
