"""Rows of KV in numba: fp32 values to and from fp16 and int8 rows, as rows.py does it in torch.

Not parallel, and without the GIL: transport threads call them beside the engine's. A loop over halves has no branch, so
it becomes vector code.
"""

import numba
import numpy as np

from pdserve.workers.kv.rows import INT8_MAX

FLOAT32, FLOAT16, INT8 = 0, 1, 2
"""What rows are held as, for `read_row` and `write_row`."""
_INT8_MAX = np.float32(INT8_MAX)

_HALF_BIAS = np.uint32(112 << 23)
_HALF_INFINITY, _HALF_NAN = np.uint32(0x7C00), np.uint32(0x7E00)
_SMALLEST_NORMAL, _TOO_LARGE, _INFINITY = np.uint32(0x38800000), np.uint32(0x477FF000), np.uint32(0x7F800000)
_TWO_112 = np.float32(2.0**112)
_TWO_24 = np.float32(2.0**24)
_NAN = np.float32(np.nan)


@numba.njit(nogil=True, cache=True)
def decode_halves(halves, bits, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """values[:] = fp16 numbers given as their bits, [D]; `bits` is `values` as uint32. What is not finite is NaN.

    IEEE 754: exponent and mantissa at their places in fp32, times 2^112 for the other bias, is the number.
    """
    for d in range(values.shape[0]):
        half = np.uint32(halves[d])
        bits[d] = ((half & np.uint32(0x7FFF)) << np.uint32(13)) | ((half & np.uint32(0x8000)) << np.uint32(16))
    for d in range(values.shape[0]):
        is_finite = (np.uint32(halves[d]) & _HALF_INFINITY) != _HALF_INFINITY
        values[d] = values[d] * _TWO_112 if is_finite else _NAN


@numba.njit(nogil=True, cache=True)
def encode_halves(values, bits, halves):  # type: ignore[no-untyped-def]  # numba infers the types
    """halves[:] = the bits of fp32 numbers [D] rounded to fp16, to even; `bits` is `values` as uint32."""
    for d in range(values.shape[0]):
        word = bits[d]
        size = word & np.uint32(0x7FFFFFFF)
        moved = size - _HALF_BIAS
        normal = (moved + np.uint32(0xFFF) + ((moved >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
        small = np.uint32(np.rint(abs(values[d]) * _TWO_24)) if size < _SMALLEST_NORMAL else np.uint32(0)
        half = small if size < _SMALLEST_NORMAL else normal
        half = _HALF_INFINITY if size >= _TOO_LARGE else half
        half = _HALF_NAN if size > _INFINITY else half
        halves[d] = np.uint16(half | ((word >> np.uint32(16)) & np.uint32(0x8000)))


@numba.njit(nogil=True, cache=True, fastmath={"contract", "nsz", "reassoc"})
def quantize_row(values, start, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Write out[:D] for values[start : start + D], D = len(out); return the scale.

    A row with NaN or inf has a scale of NaN, so that it shows.
    """
    peak, total = np.float32(0.0), np.float32(0.0)
    for d in range(out.shape[0]):
        peak = max(peak, abs(values[start + d]))
        total += values[start + d]
    inverse = _INT8_MAX / peak if peak > 0 else np.float32(0.0)
    for d in range(out.shape[0]):
        out[d] = np.int8(np.rint(values[start + d] * inverse))
    return peak / _INT8_MAX + total * np.float32(0.0)


@numba.njit(nogil=True, cache=True)
def read_row(kind, floats, halves, bytes_, bits, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """values[:] = the row, [D]; `floats`, `halves` and `bytes_` are its views, `bits` is `values` as uint32."""
    size = values.shape[0]
    if kind == FLOAT32:
        for d in range(size):
            values[d] = floats[d]
    elif kind == FLOAT16:
        decode_halves(halves, bits, values)
    else:
        scale = floats[(size + 3) // 4]
        for d in range(size):
            values[d] = np.float32(bytes_[d]) * scale


@numba.njit(nogil=True, cache=True)
def write_row(kind, values, bits, floats, halves, bytes_):  # type: ignore[no-untyped-def]  # numba infers the types
    """The row = values[:], [D]; see read_row."""
    size = values.shape[0]
    if kind == FLOAT32:
        for d in range(size):
            floats[d] = values[d]
    elif kind == FLOAT16:
        encode_halves(values, bits, halves)
    else:
        for d in range(size, bytes_.shape[0]):
            bytes_[d] = 0
        floats[(size + 3) // 4] = quantize_row(values, 0, bytes_[:size])
