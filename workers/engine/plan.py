"""The plan of one engine step: arrays only, made by the scheduler, read by the runner.

One object a step (struct of arrays), so that it can be sent to other ranks as it is. A *row* is one sequence in the
step; its tokens lie together in `token_ids`. Shape letters: T tokens, R rows, G KV groups, S rows that sample.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.request import TokenLogprobs

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


NO_TOKEN = -1
"""Stands where a row had no finite logits to take a token from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """How one row's logits are changed; see logit_rules.apply_rules. Ids are distinct within an array."""

    repetition: float
    seen_ids: Int32
    """Tokens of prompt and output; empty without a repetition penalty."""
    frequency: float
    presence: float
    output_ids: Int32
    output_counts: Int32
    bias_ids: Int32
    biases: Float32
    banned_ids: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Prompt tokens whose log probability is wanted, Q of them, over all rows."""

    tokens: Int32
    """[Q] the token (of T) after which each stands."""
    targets: Int32
    """[Q] its id."""
    num_top: Int32
    """[Q] most likely tokens to report with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step produced."""

    token_ids: Int32
    """[S] one token per sampled row, or NO_TOKEN."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """S entries, None where not asked for; empty if nobody asked."""
    scores: tuple[TokenLogprobs, ...] = ()
    """One per scored token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters of the rows that sample, each of shape [S]."""

    temperature: Float64
    top_k: Int32
    top_p: Float64
    min_p: Float64
    seed: UInt64
    sample: UInt64
    position: Int64
    """Output index of the token to draw: the counter of the row's random stream."""
    num_logprobs: Int32
    """Most likely tokens to report; -1 reports nothing."""
    rules: tuple[tuple[int, RowRules], ...] = ()
    """(row of these arrays, rules) of the rows whose logits are changed before a token is taken."""

    @property
    def is_greedy(self) -> NDArray[np.bool_]:
        """Rows that take the largest logit; shape [S]."""
        greedy: NDArray[np.bool_] = self.temperature == 0.0
        return greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """What goes through the decoder in one step."""

    token_ids: Int32
    """[T] ids to feed."""
    positions: Int32
    """[T] position of each token in its sequence."""
    row_starts: Int32
    """[R + 1] first token of each row; the last entry is T."""
    block_tables: tuple[Int32, ...]
    """G arrays [R, blocks]: block ids of each row; entries past a row's length are undefined."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_starts) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(ForwardPlan):
    """What to compute in one step."""

    sample_rows: Int32
    """[S] rows whose last token is sampled from."""
    sampling: SamplingArrays
    scored: ScoredTokens | None = None

    @property
    def logits_indices(self) -> Int32:
        """[S + Q] tokens whose hidden state is wanted: those sampled from, then those that score the next one."""
        sampled = self.row_starts[self.sample_rows + 1] - 1
        if self.scored is None:
            return sampled
        return np.concatenate([sampled, self.scored.tokens])
