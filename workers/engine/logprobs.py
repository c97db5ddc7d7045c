"""Log probabilities of tokens: of the model itself, before temperature, filters, penalties and biases.

log softmax in fp64, summed over fixed vocabulary tiles in token order, so a row's values depend on its logits only.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.request import TokenLogprob, TokenLogprobs
from pdserve.workers.engine.sampler import SUM_TILE


@numba.njit(nogil=True, cache=True)
def _log_normaliser(logits):  # type: ignore[no-untyped-def]  # numba infers the types
    peak = np.float64(logits.max())
    total = 0.0
    for start in range(0, logits.shape[0], SUM_TILE):
        partial = 0.0
        for token in range(start, min(start + SUM_TILE, logits.shape[0])):
            partial += np.exp(np.float64(logits[token]) - peak)
        total += partial
    return peak + np.log(total)


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
    border = np.partition(logits, len(logits) - count)[len(logits) - count]
    over = np.flatnonzero(logits > border)
    equal = np.flatnonzero(logits == border)[: count - len(over)]
    candidates = np.concatenate([over, equal])
    order = np.lexsort((candidates, -logits[candidates]))
    found: list[int] = candidates[order].tolist()
    return found
