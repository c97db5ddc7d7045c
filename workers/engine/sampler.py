"""Draws tokens from logits: one uniform per draw, inverse CDF in token-id order.

The uniform of a draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) keyed by the
request's seed and counted by (sample, output position): it depends on nothing else, so a replay or another batch draws
the same token. Weights are exp((logit - largest) / temperature) in fp32, summed in fp64 over fixed tiles. Rows are
drawn in parallel, each by one thread and in one order.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from pdserve.workers.engine.plan import Int32, Int64, SamplingArrays
from pdserve.workers.engine.selection import keep_largest
from pdserve.workers.model.scalar_math import exp32

SUM_TILE = 4096
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_UNIT = 2.0**-53
_FLOOR = -50.0
"""Weights below e^-50 are 0: all tokens of a vocabulary of 262,144 together would hold less than 2^-53 of the mass."""


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


@numba.njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})
def row_maximum(logits):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return the largest of logits [V]."""
    best = logits[0]
    for token in range(1, logits.shape[0]):
        best = max(best, logits[token])
    return best


@numba.njit(nogil=True, cache=True, fastmath={"contract", "nsz"})
def _weigh(logits, temperature):  # type: ignore[no-untyped-def]  # numba infers the types
    peak = np.float64(row_maximum(logits))
    weights = np.empty(logits.shape[0], np.float32)
    for token in range(logits.shape[0]):
        exponent = (np.float64(logits[token]) - peak) / temperature
        weight = exp32(np.float32(exponent))
        weights[token] = weight if exponent > _FLOOR else np.float32(0.0)
    return weights


@numba.njit(nogil=True, cache=True, fastmath={"contract", "nsz", "reassoc"})
def _tile_sums(weights):  # type: ignore[no-untyped-def]  # numba infers the types
    sums = np.empty((weights.shape[0] + SUM_TILE - 1) // SUM_TILE, np.float64)
    for tile in range(sums.shape[0]):
        partial = 0.0
        for place in range(tile * SUM_TILE, min((tile + 1) * SUM_TILE, weights.shape[0])):
            partial += np.float64(weights[place])
        sums[tile] = partial
    return sums


@numba.njit(nogil=True, cache=True)
def _draw(weights, uniform):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return the first place whose cumulative weight exceeds uniform × total."""
    sums = _tile_sums(weights)
    total = 0.0
    for partial in sums:
        total += partial
    target = uniform * total
    before = 0.0
    last = 0
    for tile in range(sums.shape[0]):
        start, end = tile * SUM_TILE, min((tile + 1) * SUM_TILE, weights.shape[0])
        if before + sums[tile] > target:
            within = before
            for place in range(start, end):
                within += np.float64(weights[place])
                if weights[place] > 0.0:
                    last = place
                    if within > target:
                        return place
            # The tile's own sum was rounded the other way: its last token it is.
            return last
        before += sums[tile]
    for place in range(weights.shape[0]):
        if weights[place] > 0.0:
            last = place
    return last


@numba.njit(nogil=True, cache=True)
def _sample_row(logits, temperature, top_k, top_p, min_p, seed, sample, position):  # type: ignore[no-untyped-def]  # numba infers the types
    weights = _weigh(logits, temperature)
    uniform = philox_uniform(seed, sample, np.uint64(position))
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        return _draw(weights, uniform)
    ids, kept = keep_largest(weights, top_k, top_p, min_p)
    return ids[_draw(kept, uniform)] if ids.shape[0] else np.int32(0)


@numba.njit(nogil=True, parallel=True, cache=True)
def _sample_rows(logits, rows, temperature, top_k, top_p, min_p, seed, sample, position, token_ids):  # type: ignore[no-untyped-def]  # numba infers the types
    for index in numba.prange(rows.shape[0]):
        row = rows[index]
        token_ids[index] = _sample_row(
            logits[index],
            temperature[row],
            top_k[row],
            top_p[row],
            min_p[row],
            seed[row],
            sample[row],
            position[row],
        )


def sample_rows(logits: NDArray[np.float32], sampling: SamplingArrays, rows: Int64 | NDArray[np.intp]) -> Int32:
    """Draw one token for each row of logits [n, V]; row i uses the parameters sampling[rows[i]]."""
    token_ids = np.empty(len(rows), np.int32)
    _sample_rows(
        logits,
        rows,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.sample,
        sampling.position,
        token_ids,
    )
    return token_ids
