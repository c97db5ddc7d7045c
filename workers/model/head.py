"""The output head: hidden states to logits, in fixed vocabulary tiles.

Greedy rows need no logits in memory: a running maximum over the tiles is enough. Other rows get their whole row of
logits. Ties break by the lower token id. The tile size is fixed, so a row's result does not depend on its batch.
"""

import numba
import numpy as np
import torch

from pdserve.workers.engine.plan import Int32, SamplingArrays
from pdserve.workers.engine.sampler import sample_rows
from pdserve.workers.model.linear import Linear

VOCABULARY_TILE = 16384


@numba.njit(nogil=True, fastmath={"nnan", "nsz"})
def _row_maximum(logits, row):  # type: ignore[no-untyped-def]  # numba infers the types
    best = logits[row, 0]
    for column in range(1, logits.shape[1]):
        best = max(best, logits[row, column])
    return best


@numba.njit(nogil=True, parallel=True, cache=True)
def _update_largest(logits, offset, largest, token_ids):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in numba.prange(logits.shape[0]):
        best = _row_maximum(logits, row)
        if best > largest[row]:
            for column in range(logits.shape[1]):
                if logits[row, column] == best:
                    largest[row], token_ids[row] = best, offset + column
                    break


class Head:
    """The head of a model, as packed tiles of VOCABULARY_TILE rows of its weight."""

    def __init__(self, tiles: list[Linear], vocab_size: int) -> None:
        self._tiles = tiles
        self._vocab_size = vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [S, V] for hidden [S, H]."""
        return torch.cat([tile(hidden) for tile in self._tiles], dim=1)

    def sample(self, hidden: torch.Tensor, sampling: SamplingArrays) -> Int32:
        """Return one token id per row of hidden [S, H]."""
        num_rows = hidden.shape[0]
        drawn = np.flatnonzero(~sampling.is_greedy)
        largest = np.full(num_rows, -np.inf, np.float32)
        token_ids = np.zeros(num_rows, np.int32)
        rows = np.empty((len(drawn), self._vocab_size), np.float32)
        offset = 0
        for tile in self._tiles:
            logits = tile(hidden).cpu().numpy()
            _update_largest(logits, offset, largest, token_ids)
            if len(drawn):
                rows[:, offset : offset + tile.out_features] = logits[drawn]
            offset += tile.out_features
        if len(drawn):
            token_ids[drawn] = sample_rows(rows, sampling, drawn)
        return token_ids
