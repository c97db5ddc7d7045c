"""The bitwise class: a request's logits and text depend on the request and its seed alone."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.config import LinearKind
from pdserve.cluster.base.request import Request
from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.assembly import AssembledEngine, kv_layout
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import Int32, StepPlan
from pdserve.workers.engine.sampler import sample_rows
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.runner import OnLayer, TransformerRunner
from support.checkpoints import FAMILIES
from support.engines import make_engine, make_request, prompts_of, run

Logits = dict[tuple[int, int], NDArray[np.float32]]
LENGTHS = (1, 15, 16, 17, 31, 48, 97, 140)
CHUNKS = (1, 2, 7, 16, 33, 64, 512)


class RecordingRunner:
    """Runs plans and keeps the logits of every draw, by (seed, position): seeds are unique in these tests."""

    def __init__(self, runner: TransformerRunner) -> None:
        self._runner = runner
        self.logits: Logits = {}

    def bind_thread(self) -> None:
        self._runner.bind_thread()

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> Int32:
        logits = self._runner.logits(plan, on_layer).numpy()
        for row, (seed, position) in enumerate(zip(plan.sampling.seed, plan.sampling.position, strict=True)):
            self.logits[int(seed), int(position)] = logits[row].copy()
        return sample_rows(logits, plan.sampling, np.arange(len(logits)))


def record(
    assembled: AssembledEngine,
    requests: Sequence[Request],
    *,
    block_size: int = 16,
    max_batch_tokens: int = 512,
    max_running: int = 64,
    threads: int = 1,
    num_blocks: int = 96,
) -> tuple[Logits, dict[str, list[int]], Engine]:
    """Run requests on a fresh engine over the same loaded model; return logits and texts."""
    model = assembled.model
    layout = kv_layout(model.spec, block_size, model_digest=model.digest)
    store = KVStore(layout, num_blocks=num_blocks, device=torch.device("cpu"))
    for layer in range(model.spec.num_layers):
        store.layer(layer).fill_(float("nan"))  # a read of anything not written shows
    runner = RecordingRunner(TransformerRunner(model, store, num_threads=threads))
    runner.bind_thread()
    engine = Engine(
        SchedulerSettings(
            block_size=block_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            max_waiting=100,
            max_model_len=min(num_blocks * block_size, 1024),
        ),
        runner,
        num_groups=len(model.spec.groups),
        num_blocks=num_blocks,
        clock=ManualClock(),
    )
    texts = run(engine, requests)
    assert engine.pool.num_free == num_blocks
    return runner.logits, texts, engine


def make_requests(lengths: Sequence[int] = LENGTHS, max_tokens: int = 12) -> list[Request]:
    return [
        make_request(str(seed), prompt, temperature=0.9, seed=seed, max_tokens=max_tokens)
        for seed, prompt in enumerate(prompts_of(lengths), start=1)
    ]


def alone(assembled: AssembledEngine, requests: Sequence[Request]) -> tuple[Logits, dict[str, list[int]]]:
    logits: Logits = {}
    texts: dict[str, list[int]] = {}
    for request in requests:
        found, text, _ = record(assembled, [request])
        logits |= found
        texts |= text
    return logits, texts


def assert_same_bits(found: Logits, expected: Logits) -> None:
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        assert np.isfinite(logits).all()
        assert found[key].tobytes() == logits.tobytes(), f"seed {key[0]}, position {key[1]}: other bits"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("linear", list(LinearKind))
def test_logits_have_the_same_bits_in_any_batch(
    tiny_checkpoints: dict[str, Path], family: str, linear: LinearKind
) -> None:
    assembled = make_engine(tiny_checkpoints[family], linear=linear, threads=2)
    assert assembled.numerics.numerics_class is NumericsClass.BITWISE, assembled.numerics.note
    requests = make_requests()
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_preemption_changes_no_bit(tiny_checkpoints: dict[str, Path], family: str) -> None:
    assembled = make_engine(tiny_checkpoints[family])
    requests = make_requests((14, 20, 31, 40), max_tokens=50)
    expected, texts = alone(assembled, requests)
    found, found_texts, engine = record(assembled, requests, num_blocks=14, max_batch_tokens=48)
    assert engine.scheduler.num_preemptions > 0
    assert_same_bits(found, expected)
    assert found_texts == texts


def test_odd_widths_have_the_same_bits(odd_checkpoint: Path) -> None:
    assembled = make_engine(odd_checkpoint, linear=LinearKind.FP16, threads=2)
    requests = make_requests()
    expected, _ = alone(assembled, requests)
    found, _, _ = record(assembled, requests, max_batch_tokens=29, block_size=48, threads=2)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("linear", list(LinearKind))
def test_the_demo_model_has_the_same_bits_in_any_batch(demo_folder: Path, linear: LinearKind) -> None:
    assembled = make_engine(demo_folder, linear=linear, threads=2, kv_memory_gib=0.1)
    assert assembled.numerics.numerics_class is NumericsClass.BITWISE, assembled.numerics.note
    requests = [
        make_request(str(seed), prompt, temperature=0.9, seed=seed, max_tokens=4)
        for seed, prompt in enumerate(prompts_of((5, 40, 600), vocab_size=200000), start=1)
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
