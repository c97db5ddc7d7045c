"""The self-test of a loaded model, and its first runs: probe prompts at several batch shapes."""

import hashlib
import time
from dataclasses import dataclass

import numpy as np
import torch

from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.engine.plan import Int32, SamplingArrays, StepPlan
from pdserve.workers.model.runner import TransformerRunner

PROBE_LENGTHS = (37, 21, 5)
"""All at most loader.SELF_TEST_TOKENS."""
PROBE_CHUNKS = (64, 16, 7, 2)
"""2: a decode's few queries go through other loops than a prefill's."""
WARM_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What the self-test found: the class, a digest of probe logits, and why the class is not bitwise."""

    numerics_class: NumericsClass
    digest: str
    note: str


class SelfTest:
    """Runs probes on a runner, before it serves: they overwrite KV blocks."""

    def __init__(self, runner: TransformerRunner) -> None:
        self._runner = runner
        self._block_size = runner.store.block_size

    def run(self, notes_of_others: tuple[str, ...] = ()) -> Numerics:
        """Compare probe logits at several batch shapes; `notes_of_others` are those of other ranks.

        The digest covers the logits of every probe computed alone, so equal digests mean equal bits.
        """
        alone = [self._probe([index], PROBE_CHUNKS[0])[0] for index in range(len(PROBE_LENGTHS))]
        digest = hashlib.blake2b(digest_size=16)
        for logits in alone:
            digest.update(logits.cpu().numpy().tobytes())
        notes = list(dict.fromkeys([*self._runner.notes, *notes_of_others]))
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
        plans = [self._plan([0], {0: 0}, {0: length}, table, temperature=temperature) for temperature in (0.0, 1.0)]
        for plan in plans:
            self._runner.execute(plan)
        durations = []
        for _ in range(WARM_RUNS):
            start_time = time.perf_counter()
            self._runner.execute(plans[0])
            durations.append(time.perf_counter() - start_time)
        return min(durations) / length

    @property
    def _blocks_each(self) -> int:
        return -(-max(PROBE_LENGTHS) // self._block_size)

    def _probe(self, indexes: list[int], chunk: int) -> list[torch.Tensor]:
        """Prefill the probes `indexes` together, `chunk` tokens of each per step; return their last logits."""
        blocks_each = self._blocks_each
        done = dict.fromkeys(indexes, 0)
        results: dict[int, torch.Tensor] = {}
        while len(results) < len(indexes):
            rows = [index for index in indexes if done[index] < PROBE_LENGTHS[index]]
            ends = {index: min(done[index] + chunk, PROBE_LENGTHS[index]) for index in rows}
            table = np.stack([np.arange(blocks_each, dtype=np.int32) + index * blocks_each for index in rows])
            for index, logits in zip(rows, self._runner.logits(self._plan(rows, done, ends, table)), strict=True):
                if ends[index] == PROBE_LENGTHS[index]:
                    results[index] = logits
                done[index] = ends[index]
        return [results[index] for index in indexes]

    def _plan(
        self, rows: list[int], done: dict[int, int], ends: dict[int, int], table: Int32, temperature: float = 0.0
    ) -> StepPlan:
        positions = [np.arange(done[index], ends[index], dtype=np.int32) for index in rows]
        vocab_size = self._runner.vocab_size
        token_ids = [
            (place * 7919 + 104729 * (index + 1)) % vocab_size for index, place in zip(rows, positions, strict=True)
        ]
        starts = np.cumsum([0] + [len(place) for place in positions]).astype(np.int32)
        zeros = np.zeros(len(rows))
        return StepPlan(
            token_ids=np.concatenate(token_ids).astype(np.int32),
            positions=np.concatenate(positions),
            row_starts=starts,
            block_tables=(table,) * self._runner.num_groups,
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
