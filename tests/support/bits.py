"""Records the logits of every draw, so that two ways of computing a text can be compared bit by bit."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request
from pdserve.workers.assembly import AssembledEngine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.engine.sampler import sample_rows
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.strategies import Strategy
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.memory_plan import kv_layout
from pdserve.workers.model.runner import OnLayer, TransformerRunner
from support.engines import make_request, prompts_of, run

KINDS = (
    *((linear, KVDtype.FLOAT32) for linear in LinearKind),
    (LinearKind.FP16, KVDtype.FLOAT16),
    (LinearKind.FP16, KVDtype.INT8),
)
"""Weights and KV of the bitwise class."""

Logits = dict[tuple[int, int], NDArray[np.float32]]
LENGTHS = (1, 15, 16, 17, 31, 48, 97, 140)


class RecordingRunner:
    """Runs plans and keeps the logits of every draw, by (seed, position): seeds are unique in these tests."""

    def __init__(self, runner: TransformerRunner) -> None:
        self._runner = runner
        self.logits: Logits = {}

    def bind_thread(self) -> None:
        """See ModelRunner."""
        self._runner.bind_thread()

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        self._runner.copy_block(group, source, target)

    def settle(self, copies: Copies) -> None:
        """See ModelRunner."""
        self._runner.settle(copies)

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner."""
        logits = self._runner.logits(plan, on_layer, exported, copies).numpy()
        for row, (seed, position) in enumerate(zip(plan.sampling.seed, plan.sampling.position, strict=True)):
            self.logits[int(seed), int(position)] = logits[row].copy()
        return StepOutput(token_ids=sample_rows(logits, plan.sampling, np.arange(len(logits))))


def plain_engine(
    assembled: AssembledEngine,
    *,
    block_size: int = 16,
    max_batch_tokens: int = 512,
    max_running: int = 64,
    threads: int = 1,
    num_blocks: int = 96,
    host_blocks: int = 0,
    has_prefix_cache: bool = True,
    strategy: Strategy | None = None,
) -> Engine:
    """Return a fresh engine over the same loaded model; its KV is NaN wherever nothing was written."""
    model = assembled.model
    layout = kv_layout(
        model.spec, block_size, model_digest=model.digest, kv_dtype=KVDtype(assembled.store.layout.kv_dtype)
    )
    counts = [num_blocks] * len(layout.groups)
    store = KVStore(layout, num_blocks=counts, device=torch.device("cpu"))
    for layer in range(model.spec.num_layers):
        # NaN, as fp32 and as the scale of an int8 row: a read of anything not written shows.
        store.layer(layer).view(torch.int8).fill_(-1)
    runner = TransformerRunner(model, store, num_threads=threads)
    runner.bind_thread()
    return Engine(
        SchedulerSettings(
            block_size=block_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            max_waiting=100,
            max_model_len=min(num_blocks * block_size, 1024),
            has_prefix_cache=has_prefix_cache,
        ),
        runner,
        layout=layout,
        num_blocks=counts,
        clock=ManualClock(),
        strategy=strategy,
        host=HostTier(store, [host_blocks] * len(counts), ManualClock()) if host_blocks else None,
    )


def with_kv(assembled: AssembledEngine, kv_dtype: KVDtype) -> AssembledEngine:
    """Return the same loaded model for plain engines with another KV; its own engine keeps the one it has."""
    layout = assembled.store.layout
    layout = replace(layout, kv_dtype=kv_dtype)
    store = KVStore(layout, num_blocks=[1] * len(layout.groups), device=torch.device("cpu"))
    return replace(assembled, store=store)


def recording_engine(
    assembled: AssembledEngine, strategy: Strategy | None = None, **limits: int
) -> tuple[Engine, RecordingRunner, KVStore]:
    """Return such an engine that records logits, with its recorder and its store."""
    engine = plain_engine(assembled, strategy=strategy, **limits)
    assert isinstance(engine.runner, TransformerRunner)
    store = engine.runner.store
    recorder = RecordingRunner(engine.runner)
    engine.runner = recorder
    return engine, recorder, store


def record(
    assembled: AssembledEngine, requests: Sequence[Request], strategy: Strategy | None = None, **limits: int
) -> tuple[Logits, dict[str, list[int]], Engine]:
    """Run requests on a fresh engine; return logits and texts."""
    engine, runner, _ = recording_engine(assembled, strategy, **limits)
    texts = run(engine, requests)
    assert engine.pool.is_all_free
    return runner.logits, texts, engine


def make_seeded_requests(lengths: Sequence[int] = LENGTHS, max_tokens: int = 12) -> list[Request]:
    """Return requests that draw, each with a seed of its own."""
    return [
        make_request(str(seed), prompt, temperature=0.9, seed=seed, max_tokens=max_tokens)
        for seed, prompt in enumerate(prompts_of(lengths), start=1)
    ]


def alone(assembled: AssembledEngine, requests: Sequence[Request]) -> tuple[Logits, dict[str, list[int]]]:
    """Run requests one at a time, each on a fresh engine; return logits and texts."""
    logits: Logits = {}
    texts: dict[str, list[int]] = {}
    for request in requests:
        found, text, _ = record(assembled, [request])
        logits |= found
        texts |= text
    return logits, texts


def assert_same_bits(found: Logits, expected: Logits) -> None:
    """Every draw of both had logits of the same bits."""
    assert found.keys() == expected.keys()
    for key, logits in expected.items():
        assert np.isfinite(logits).all()
        assert found[key].tobytes() == logits.tobytes(), f"seed {key[0]}, position {key[1]}: other bits"
