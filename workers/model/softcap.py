"""Soft caps of attention scores and logits on CPU: cap · tanh(x / cap), by one exp for all widths."""

import numba
import numpy as np

from pdserve.workers.model.scalar_math import exp32

_ONE = np.float32(1.0)
_TWO = np.float32(2.0)


@numba.njit(nogil=True, fastmath={"contract", "nsz"}, inline="always")
def capped(value, cap):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return cap * tanh(value / cap)."""
    return cap * (_ONE - _TWO / (exp32(_TWO * value / cap) + _ONE))


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def cap_rows(values, cap):  # type: ignore[no-untyped-def]  # numba infers the types
    """values [T, N] = cap * tanh(values / cap), in place."""
    for row in numba.prange(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] = capped(values[row, column], cap)
