"""The plan of one engine step: arrays only, made by the scheduler, read by the runner.

One object a step (struct of arrays), so that it can be sent to other ranks as it is. A *row* is one sequence in the
step; its tokens lie together in `token_ids`. Shape letters: T tokens, R rows, G KV groups, S rows that sample.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters of the rows that sample, each of shape [S]."""

    temperature: Float64
    top_k: Int32
    top_p: Float64
    min_p: Float64
    seed: UInt64
    position: Int64
    """Output index of the token to draw: the counter of the row's random stream."""

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Rows that take the largest logit; shape [S]."""
        greedy: NDArray[np.bool_] = self.temperature == 0.0
        return greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What to compute in one step."""

    token_ids: Int32
    """[T] ids to feed."""
    positions: Int32
    """[T] position of each token in its sequence."""
    row_starts: Int32
    """[R + 1] first token of each row; the last entry is T."""
    block_tables: tuple[Int32, ...]
    """G arrays [R, blocks]: block ids of each row; entries past a row's length are undefined."""
    sample_rows: Int32
    """[S] rows whose last token is sampled from."""
    sampling: SamplingArrays

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_starts) - 1
