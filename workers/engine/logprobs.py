"""Log probabilities of tokens: of the model itself, before temperature, filters, penalties and biases.

log softmax: exponentials in fp32, summed in fp64 over fixed vocabulary tiles in one order, so a row's values depend on
its logits only.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.request import TokenLogprob, TokenLogprobs
from pdserve.workers.engine.sampler import SUM_TILE, row_maximum
from pdserve.workers.model.scalar_math import exp32

_MARGINS = (np.float32(4.0), np.float32(16.0))
"""The largest logits are searched within these of the largest first."""


@numba.njit(nogil=True, cache=True, fastmath={"contract", "nsz", "reassoc"})
def _log_normaliser(logits):  # type: ignore[no-untyped-def]  # numba infers the types
    peak = row_maximum(logits)
    total = 0.0
    for start in range(0, logits.shape[0], SUM_TILE):
        partial = 0.0
        for token in range(start, min(start + SUM_TILE, logits.shape[0])):
            partial += np.float64(exp32(logits[token] - peak))
        total += partial
    return np.float64(peak) + np.log(total)


def logprobs_of(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log probability of a token and of the `num_top` most likely ones; equal ones by lower id.

    Args:
        logits: [V], finite.
    """
    normaliser = _log_normaliser(logits)

    def entry(token: int) -> TokenLogprob:
        return TokenLogprob(token_id=token, logprob=float(np.float64(logits[token]) - normaliser))

    return TokenLogprobs(chosen=entry(token_id), top=tuple(entry(token) for token in _largest(logits, num_top)))


def _largest(logits: NDArray[np.float32], count: int) -> list[int]:
    """Return the ids of the `count` largest logits, largest first, equal ones by lower id."""
    count = min(count, len(logits))
    if count == 0:
        return []
    peak = row_maximum(logits)
    candidates = np.arange(len(logits))
    for margin in _MARGINS:
        near = np.flatnonzero(logits >= peak - margin)
        if len(near) >= count:
            candidates = near
            break
    values = logits[candidates]
    border = np.partition(values, len(values) - count)[len(values) - count]
    over, equal = candidates[values > border], candidates[values == border]
    kept = np.concatenate([over, equal[: count - len(over)]])
    found: list[int] = kept[np.lexsort((kept, -logits[kept]))].tolist()
    return found
