"""Draws tokens from logits: one uniform per draw, inverse CDF in token-id order.

The uniform of a draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) keyed by the
request's seed and counted by (sample, output position): it depends on nothing else, so a replay or another batch draws
the same token. Probabilities are summed in fp64 over fixed vocabulary tiles.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from pdserve.workers.engine.plan import Int32, Int64, SamplingArrays

SUM_TILE = 4096
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_UNIT = 2.0**-53
# A nucleus is searched among tokens over these shares of the total first; the last one admits every token.
_NUCLEUS_SHARES = (1e-2, 1e-4, 1e-6, 0.0)


@numba.njit(nogil=True, cache=True)
def philox_uniform(seed, sample, position):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return a uniform in [0, 1) with 53 bits for (seed, sample, position), all uint64."""
    c0, c1 = position & _MASK, position >> _SHIFT
    c2, c3 = sample & _MASK, sample >> _SHIFT
    k0, k1 = seed & _MASK, seed >> _SHIFT
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return np.float64(((c0 << _SHIFT) | c1) >> np.uint64(11)) * _UNIT


@numba.njit(nogil=True, cache=True)
def _tiled_sum(weights):  # type: ignore[no-untyped-def]  # numba infers the types
    total = 0.0
    for start in range(0, weights.shape[0], SUM_TILE):
        partial = 0.0
        for token in range(start, min(start + SUM_TILE, weights.shape[0])):
            partial += weights[token]
        total += partial
    return total


@numba.njit(nogil=True, cache=True)
def _keep_top_k(weights, top_k):  # type: ignore[no-untyped-def]  # numba infers the types
    """Zero all but the `top_k` largest weights; equal weights at the border keep the lower ids."""
    if top_k <= 0 or top_k >= weights.shape[0]:
        return
    border = np.partition(weights, weights.shape[0] - top_k)[weights.shape[0] - top_k]
    num_over = 0
    for token in range(weights.shape[0]):
        num_over += weights[token] > border
    num_equal = top_k - num_over
    for token in range(weights.shape[0]):
        if weights[token] < border:
            weights[token] = 0.0
        elif weights[token] == border:
            if num_equal > 0:
                num_equal -= 1
            else:
                weights[token] = 0.0


@numba.njit(nogil=True, cache=True)
def _keep_top_p(weights, top_p):  # type: ignore[no-untyped-def]  # numba infers the types
    """Zero all but the smallest set of largest weights whose share reaches `top_p`."""
    if top_p >= 1.0:
        return
    wanted = top_p * _tiled_sum(weights)
    total = wanted / top_p
    for share in _NUCLEUS_SHARES:
        candidates = np.flatnonzero(weights > share * total)
        mass = 0.0
        for token in candidates:
            mass += weights[token]
        if mass >= wanted:
            break
    order = candidates[np.argsort(-weights[candidates], kind="mergesort")]
    mass = 0.0
    num_kept = 0
    while num_kept < order.shape[0] and (mass < wanted or num_kept == 0):
        mass += weights[order[num_kept]]
        num_kept += 1
    kept = weights[order[:num_kept]].copy()
    weights[:] = 0.0
    for index in range(num_kept):
        weights[order[index]] = kept[index]


@numba.njit(nogil=True, cache=True)
def _draw(weights, uniform):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return the first id whose cumulative weight exceeds uniform × total."""
    target = uniform * _tiled_sum(weights)
    before = 0.0
    last = 0
    for start in range(0, weights.shape[0], SUM_TILE):
        partial = 0.0
        for token in range(start, min(start + SUM_TILE, weights.shape[0])):
            partial += weights[token]
            if weights[token] > 0.0:
                last = token
                if before + partial > target:
                    return token
        before += partial
    return last


@numba.njit(nogil=True, cache=True)
def _sample_row(logits, temperature, top_k, top_p, min_p, seed, sample, position):  # type: ignore[no-untyped-def]  # numba infers the types
    peak = logits.max()
    weights = np.empty(logits.shape[0], np.float64)
    for token in range(logits.shape[0]):
        weights[token] = np.exp((np.float64(logits[token]) - np.float64(peak)) / temperature)
    _keep_top_k(weights, top_k)
    _keep_top_p(weights, top_p)
    if min_p > 0.0:
        for token in range(weights.shape[0]):
            if weights[token] < min_p:  # the largest weight is 1
                weights[token] = 0.0
    return _draw(weights, philox_uniform(seed, sample, np.uint64(position)))


def sample_rows(logits: NDArray[np.float32], sampling: SamplingArrays, rows: Int64 | NDArray[np.intp]) -> Int32:
    """Draw one token for each row of logits [n, V]; row i uses the parameters sampling[rows[i]]."""
    token_ids = np.empty(len(rows), np.int32)
    for index, row in enumerate(rows):
        token_ids[index] = _sample_row(
            logits[index],
            sampling.temperature[row],
            sampling.top_k[row],
            sampling.top_p[row],
            sampling.min_p[row],
            sampling.seed[row],
            sampling.sample[row],
            sampling.position[row],
        )
    return token_ids
