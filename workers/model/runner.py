"""Runs step plans on a loaded model: metadata, forward pass, head, sampling.

Owns the model and the KV store of a worker. Called by the engine thread only.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numba
import numpy as np
import torch

from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.attention.protocol import build_metadata
from pdserve.workers.engine.plan import Int32, SamplingArrays, StepOutput, StepPlan
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.loader import LoadedModel

PROBE_LENGTHS = (37, 21, 5)
"""All at most loader.SELF_TEST_TOKENS."""
PROBE_CHUNKS = (64, 16, 7, 2)
"""2: a decode's few queries go through other loops than a prefill's."""
WARM_RUNS = 3


OnLayer = Callable[[int], None]


class ModelRunner(Protocol):
    """What the engine asks of a model."""

    def bind_thread(self) -> None:
        """Called once by the thread that will call execute."""

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepOutput:
        """Compute the plan; return one token per sampled row.

        `on_layer` is called with each layer's number once the KV of the step's tokens is in the store.
        """

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block's KV in all layers of a group; between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the self-test found: the class, a digest of probe logits, and why the class is not bitwise."""

    numerics_class: NumericsClass
    digest: str
    note: str


class TransformerRunner:
    """The runner of a real model."""

    def __init__(self, model: LoadedModel, store: KVStore, *, num_threads: int) -> None:
        self._model = model
        self._store = store
        self._num_threads = num_threads
        self._device = store.layer(0).device
        self._windows = tuple(group.window for group in model.spec.groups)

    @property
    def store(self) -> KVStore:
        """Where the KV of its steps goes."""
        return self._store

    @property
    def num_groups(self) -> int:
        """KV groups of the model."""
        return len(self._windows)

    def bind_thread(self) -> None:
        """Set the thread counts of torch and numba for the calling thread."""
        # numba first: where it starts its threads, it sets OpenMP's count for this thread, which is torch's too.
        numba.set_num_threads(min(self._num_threads, numba.config.NUMBA_NUM_THREADS))
        torch.set_num_threads(self._num_threads)

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepOutput:
        """See ModelRunner.execute."""
        with torch.inference_mode():
            hidden = self._hidden(plan, on_layer)
            num_sampled, head = len(plan.sample_rows), self._model.head
            output = StepOutput(token_ids=np.empty(0, np.int32))
            if num_sampled:
                output = head.sample(hidden[:num_sampled], plan.sampling)
            if plan.scored is not None:
                output = replace(output, scores=head.score(hidden[num_sampled:], plan.scored))
            return output

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        self._store.copy_block(group, source, target)

    def logits(self, plan: StepPlan, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Compute the plan; return fp32 logits of its sampled rows, [S, V]. For tests and the self-test."""
        with torch.inference_mode():
            return self._model.head.logits(self._hidden(plan, on_layer))

    def _hidden(self, plan: StepPlan, on_layer: OnLayer | None = None) -> torch.Tensor:
        step = build_metadata(plan, self._windows, self._store.block_size)
        token_ids = torch.from_numpy(plan.token_ids).to(self._device, torch.long)
        wanted = plan.row_starts[plan.sample_rows + 1] - 1
        if plan.scored is not None:
            wanted = np.concatenate([wanted, plan.scored.tokens])
        sample_tokens = torch.from_numpy(wanted).to(self._device, torch.long)
        return self._model.decoder.forward(token_ids, step, self._store, sample_tokens, on_layer)

    def self_test(self) -> Numerics:
        """Compare probe logits at several batch shapes; overwrites KV blocks, so call it before serving.

        The digest covers the logits of every probe computed alone, so equal digests mean equal bits.
        """
        alone = [self._probe([index], PROBE_CHUNKS[0])[0] for index in range(len(PROBE_LENGTHS))]
        digest = hashlib.blake2b(digest_size=16)
        for logits in alone:
            digest.update(logits.cpu().numpy().tobytes())
        notes = list(self._model.notes)
        order = list(range(len(PROBE_LENGTHS)))
        for chunk in PROBE_CHUNKS:
            order.reverse()
            for index, logits in zip(order, self._probe(order, chunk), strict=True):
                if not torch.equal(logits, alone[index]) and not notes:
                    notes.append(f"self-test: probe {index} differs in a batch at chunk {chunk}")
        numerics_class = NumericsClass.TOLERANCE if notes else NumericsClass.BITWISE
        return Numerics(numerics_class=numerics_class, digest=digest.hexdigest(), note="; ".join(notes))

    def warm_up(self) -> float:
        """Run every kind of draw once, so that nothing compiles later; return the seconds a token of prefill takes.

        The shortest of a few runs that come after: a first one compiles, and others share the machine while they load.
        """
        length = PROBE_LENGTHS[0]
        table = np.arange(self._blocks_each, dtype=np.int32)[None]
        plans = [
            self._probe_plan([0], {0: 0}, {0: length}, table, temperature=temperature) for temperature in (0.0, 1.0)
        ]
        for plan in plans:
            self.execute(plan)
        durations = []
        for _ in range(WARM_RUNS):
            start_time = time.perf_counter()
            self.execute(plans[0])
            durations.append(time.perf_counter() - start_time)
        return min(durations) / length

    @property
    def _blocks_each(self) -> int:
        return -(-max(PROBE_LENGTHS) // self._store.block_size)

    def _probe(self, indexes: list[int], chunk: int) -> list[torch.Tensor]:
        """Prefill the probes `indexes` together, `chunk` tokens of each per step; return their last logits."""
        blocks_each = self._blocks_each
        done = dict.fromkeys(indexes, 0)
        results: dict[int, torch.Tensor] = {}
        while len(results) < len(indexes):
            rows = [index for index in indexes if done[index] < PROBE_LENGTHS[index]]
            ends = {index: min(done[index] + chunk, PROBE_LENGTHS[index]) for index in rows}
            table = np.stack([np.arange(blocks_each, dtype=np.int32) + index * blocks_each for index in rows])
            plan = self._probe_plan(rows, done, ends, table)
            for index, logits in zip(rows, self.logits(plan), strict=True):
                if ends[index] == PROBE_LENGTHS[index]:
                    results[index] = logits
                done[index] = ends[index]
        return [results[index] for index in indexes]

    def _probe_plan(
        self, rows: list[int], done: dict[int, int], ends: dict[int, int], table: Int32, temperature: float = 0.0
    ) -> StepPlan:
        positions = [np.arange(done[index], ends[index], dtype=np.int32) for index in rows]
        vocab_size = self._model.spec.vocab_size
        token_ids = [
            (place * 7919 + 104729 * (index + 1)) % vocab_size for index, place in zip(rows, positions, strict=True)
        ]
        starts = np.cumsum([0] + [len(place) for place in positions]).astype(np.int32)
        zeros = np.zeros(len(rows))
        return StepPlan(
            token_ids=np.concatenate(token_ids).astype(np.int32),
            positions=np.concatenate(positions),
            row_starts=starts,
            block_tables=(table,) * self.num_groups,
            sample_rows=np.arange(len(rows), dtype=np.int32),
            sampling=SamplingArrays(
                temperature=zeros + temperature,
                # The filters only run for rows that draw.
                top_k=(zeros + 50).astype(np.int32),
                top_p=zeros + 0.9,
                min_p=zeros,
                seed=zeros.astype(np.uint64),
                sample=zeros.astype(np.uint64),
                position=zeros.astype(np.int64),
                num_logprobs=np.full(len(rows), -1, np.int32),
            ),
        )


def num_probe_blocks(block_size: int) -> int:
    """Return the blocks that the self-test needs."""
    return len(PROBE_LENGTHS) * -(-max(PROBE_LENGTHS) // block_size)
