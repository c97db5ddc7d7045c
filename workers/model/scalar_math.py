"""Scalar functions for numba kernels that LLVM can vectorise.

exp32 reduces to [-ln2/2, ln2/2] and evaluates Cephes' expf polynomial; the relative error is about 1e-7. It has no
branch and no library call, so a loop over it becomes vector code, and a value depends on its argument alone.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_MIN = np.float32(-87.0)
_MAX = np.float32(88.0)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)


@intrinsic
def _float_from_bits(typing_context, bits):  # type: ignore[no-untyped-def]  # numba's own calling convention
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]  # numba infers the types
        return builder.bitcast(arguments[0], ir.FloatType())

    return signature(types.float32, types.int32), generate


@numba.njit(nogil=True, fastmath={"contract", "nsz"}, inline="always")
def exp32(x):  # type: ignore[no-untyped-def]  # numba infers the types
    """Return e**x in fp32; arguments are clamped to [-87, 88]."""
    x = min(max(x, _MIN), _MAX)
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C0
    p = p * r + _C1
    p = p * r + _C2
    p = p * r + _C3
    p = p * r + _C4
    p = p * r + _C5
    y = p * (r * r) + r + _ONE
    return y * _float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
