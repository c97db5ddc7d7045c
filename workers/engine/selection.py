"""Keeps the largest weights of a row, by number or by mass, without sorting.

Positive floats order like their bits, so the border between kept and dropped is read from three histograms, of 11, 11
and 10 bits (radix selection). Tokens that surely lie below the border are left out before. Equal weights at the border
keep the lower ids. Everything is summed in id order, so what is kept depends on the row alone.
"""

import numba
import numpy as np

# What is kept is searched among weights over these shares of the largest first; the last one admits every token.
_SHARES = (1e-2, 1e-4, 1e-6, 0.0)
_BITS = ((21, 11), (10, 11), (0, 10))
"""(shift, width) of the digits of a float's bits, from the most significant one."""


@numba.njit(nogil=True, cache=True, fastmath={"nnan", "nsz", "reassoc", "contract"})
def _over(weights, floor):  # type: ignore[no-untyped-def]  # numba infers the types
    # How many weights lie over the floor, and their sum.
    number, mass = 0, 0.0
    for token in range(weights.shape[0]):
        is_over = weights[token] > floor
        number += is_over
        mass += np.float64(weights[token]) if is_over else 0.0
    return number, mass


@numba.njit(nogil=True, cache=True)
def _compact(weights, floor, number):  # type: ignore[no-untyped-def]  # numba infers the types
    ids, kept = np.empty(number, np.int32), np.empty(number, np.float32)
    place = 0
    for token in range(weights.shape[0]):
        if weights[token] > floor:
            ids[place], kept[place] = token, weights[token]
            place += 1
    return ids, kept


@numba.njit(nogil=True, cache=True)
def _keep(ids, weights, wanted, by_mass):  # type: ignore[no-untyped-def]  # numba infers the types
    # The fewest of the largest weights that reach `wanted`, in id order; all if all do not reach it.
    keys = weights.view(np.uint32)
    prefix = np.uint32(0)
    before = 0.0
    for shift, width in _BITS:
        measures = np.zeros(1 << width, np.float64)
        mask = np.uint32((1 << width) - 1)
        top = np.uint32(shift + width)
        for place in range(keys.shape[0]):
            # The first digit has no prefix: shifting by 32 bits is undefined.
            if top == 32 or keys[place] >> top == prefix:
                measures[(keys[place] >> np.uint32(shift)) & mask] += np.float64(weights[place]) if by_mass else 1.0
        border, reached = -1, before
        for digit in range((1 << width) - 1, -1, -1):
            if measures[digit] > 0.0:
                border, before = digit, reached
                reached += measures[digit]
                if reached >= wanted:
                    break
        if top == 32 and reached < wanted:
            return ids, weights
        # A later digit's sums may be rounded to just below what they reached together: then its last one it is.
        prefix = np.uint32((prefix << np.uint32(width)) | np.uint32(border))
    is_kept = np.zeros(keys.shape[0], np.bool_)
    number = 0
    for place in range(keys.shape[0]):
        if keys[place] > prefix:
            is_kept[place] = True
        elif keys[place] == prefix and before < wanted:
            is_kept[place] = True
            before += np.float64(weights[place]) if by_mass else 1.0
        number += is_kept[place]
    return ids[is_kept], weights[is_kept]


@numba.njit(nogil=True, cache=True)
def keep_largest(weights, top_k, top_p, min_p):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return (ids, weights) of the kept tokens, in id order.

    First the `top_k` largest (0: all), of these the fewest largest whose share reaches `top_p`, of these those of at
    least `min_p`.

    Args:
        weights: fp32 [V], not negative, the largest 1.
    """
    has_k = 0 < top_k < weights.shape[0]
    wanted = 0.0
    if top_p < 1.0 and not has_k:
        wanted = top_p * _over(weights, np.float32(0.0))[1]
    floor = np.float32(0.0)
    number = 0
    for share in _SHARES:
        floor = np.float32(share)
        number, mass = _over(weights, floor)
        if (not has_k or number >= top_k) and mass >= wanted and (has_k or top_p < 1.0 or share < min_p):
            break
    ids, kept = _compact(weights, floor, number)
    if has_k:
        ids, kept = _keep(ids, kept, np.float64(top_k), False)
    if top_p < 1.0:
        ids, kept = _keep(ids, kept, top_p * _over(kept, np.float32(0.0))[1] if has_k else wanted, True)
    if min_p > 0.0:
        is_kept = kept >= min_p
        ids, kept = ids[is_kept], kept[is_kept]
    return ids, kept
