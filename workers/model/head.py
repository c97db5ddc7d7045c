"""The output head: hidden states to logits, in fixed vocabulary tiles.

Greedy rows need no logits in memory: a running maximum over the tiles is enough. Other rows get their whole row of
logits. Ties break by the lower token id. The tile size is fixed, so a row's result does not depend on its batch.
"""

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.request import TokenLogprobs
from pdserve.workers.engine.logit_rules import apply_rules
from pdserve.workers.engine.logprobs import logprobs_of
from pdserve.workers.engine.plan import NO_TOKEN, Float32, Int32, SamplingArrays, ScoredTokens, StepOutput
from pdserve.workers.engine.sampler import row_maximum, sample_rows
from pdserve.workers.model.linear import Linear

VOCABULARY_TILE = 16384
SCORED_ROWS = 16
"""Rows of logits that are held at once to score a prompt."""

Indexes = NDArray[np.intp]


@numba.njit(nogil=True, parallel=True, cache=True)
def _update_largest(logits, offset, largest, token_ids):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in numba.prange(logits.shape[0]):
        best = row_maximum(logits[row])
        if best > largest[row]:
            for column in range(logits.shape[1]):
                if logits[row, column] == best:
                    largest[row], token_ids[row] = best, offset + column
                    break


def _zero_where_not_finite(hidden: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.bool_]]:
    """Return hidden [S, H] with rows that hold NaN or inf as zeros, and which rows are finite, [S]."""
    is_finite = torch.isfinite(hidden).all(dim=1)
    flags: NDArray[np.bool_] = is_finite.cpu().numpy()
    return hidden if flags.all() else torch.where(is_finite[:, None], hidden, 0.0), flags


class Head:
    """The head of a model, as packed tiles of VOCABULARY_TILE rows of its weight."""

    def __init__(self, tiles: list[Linear], vocab_size: int) -> None:
        self._tiles = tiles
        self._vocab_size = vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [S, V] for hidden [S, H]."""
        return torch.cat([tile(hidden) for tile in self._tiles], dim=1)

    def sample(self, hidden: torch.Tensor, sampling: SamplingArrays) -> StepOutput:
        """Return one token id per row of hidden [S, H], and log probabilities where they are asked for.

        A row of hidden that is not finite has NO_TOKEN, and no log probabilities that mean anything.
        """
        hidden, is_finite = _zero_where_not_finite(hidden)
        output = self._sample(hidden, sampling)
        output.token_ids[~is_finite] = NO_TOKEN
        return output

    def _sample(self, hidden: torch.Tensor, sampling: SamplingArrays) -> StepOutput:
        num_rows = hidden.shape[0]
        is_whole = ~sampling.is_greedy | (sampling.num_logprobs >= 0)
        for row, _ in sampling.rules:
            is_whole[row] = True
        whole = np.flatnonzero(is_whole)
        largest = np.full(num_rows, -np.inf, np.float32)
        token_ids = np.zeros(num_rows, np.int32)
        rows = np.empty((len(whole), self._vocab_size), np.float32)
        offset = 0
        for tile in self._tiles:
            logits = tile(hidden).cpu().numpy()
            _update_largest(logits, offset, largest, token_ids)
            if len(whole):
                np.take(logits, whole, axis=0, out=rows[:, offset : offset + tile.out_features], mode="clip")
            offset += tile.out_features
        if not len(whole):
            return StepOutput(token_ids=token_ids)
        return self._finish(rows, whole, token_ids, sampling)

    def score(self, hidden: torch.Tensor, scored: ScoredTokens) -> tuple[TokenLogprobs, ...]:
        """Return the log probability of each scored token; hidden [Q, H] are the states before them."""
        hidden, _ = _zero_where_not_finite(hidden)
        scores: list[TokenLogprobs] = []
        for start in range(0, len(scored.targets), SCORED_ROWS):
            logits = self.logits(hidden[start : start + SCORED_ROWS]).cpu().numpy()
            for row, target, num_top in zip(
                logits, scored.targets[start:].tolist(), scored.num_top[start:].tolist(), strict=False
            ):
                scores.append(logprobs_of(row, target, num_top))
        return tuple(scores)

    def _finish(self, rows: Float32, whole: Indexes, token_ids: Int32, sampling: SamplingArrays) -> StepOutput:
        """Take tokens from whole rows of logits; `whole` are their places among the sampled rows."""
        rules = dict(sampling.rules)
        wanted = sampling.num_logprobs[whole]
        # Log probabilities are the model's own.
        originals = {
            place: rows[place].copy() for place, row in enumerate(whole) if wanted[place] >= 0 and row in rules
        }
        for place, row in enumerate(whole.tolist()):
            if row in rules:
                apply_rules(rows[place], rules[row])
                token_ids[row] = rows[place].argmax()
        drawn = np.flatnonzero(~sampling.is_greedy[whole])
        if len(drawn):
            token_ids[whole[drawn]] = sample_rows(rows[drawn], sampling, whole[drawn])
        if (wanted < 0).all():
            return StepOutput(token_ids=token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for place, row in enumerate(whole.tolist()):
            if wanted[place] >= 0:
                logits = originals.get(place, rows[place])
                logprobs[row] = logprobs_of(logits, int(token_ids[row]), int(wanted[place]))
        return StepOutput(token_ids=token_ids, logprobs=tuple(logprobs))
