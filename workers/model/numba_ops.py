"""Fused CPU kernels between linears. Each row (token) is computed alone by one piece of code with one trip count, so
its bits depend on its own inputs only, at any batch size and thread count.
"""

import numba
import numpy as np
import torch

from pdserve.workers.attention.protocol import StepMetadata
from pdserve.workers.kv.row_kernels import encode_halves, quantize_row
from pdserve.workers.kv.rows import row_scales
from pdserve.workers.model.families import Activation, Router
from pdserve.workers.model.numba_mixture import add_weighted_rows, choose_experts, swiglu_clamped
from pdserve.workers.model.ops import QKVParameters
from pdserve.workers.model.scalar_math import exp32

_ROW_MATH = {"contract", "nsz", "reassoc"}
_ONE = np.float32(1.0)
_ABSENT = np.empty(0, np.float32)
_PARALLEL_VALUES = 1 << 16
"""For fewer, waking another thread costs more than it saves."""
_GELU_SCALE = np.float32(2.0 * 0.7978845608028654)
_GELU_CUBE = np.float32(0.044715)


@numba.njit(nogil=True, fastmath=_ROW_MATH)
def _inverse_rms(row, start, size, eps):  # type: ignore[no-untyped-def]  # numba infers the types
    total = np.float32(0.0)
    for d in range(size):
        total += row[start + d] * row[start + d]
    return _ONE / np.sqrt(total / np.float32(size) + eps)


@numba.njit(nogil=True, parallel=True, cache=True, fastmath=_ROW_MATH)
def _norm(x, weight, eps, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for token in numba.prange(x.shape[0]):
        scale = _inverse_rms(x[token], 0, x.shape[1], eps)
        for d in range(x.shape[1]):
            out[token, d] = x[token, d] * scale * weight[d]


@numba.njit(nogil=True, parallel=True, cache=True, fastmath=_ROW_MATH)
def _add_norm(x, delta, post, has_post, weight, eps, out):  # type: ignore[no-untyped-def]  # numba infers the types
    size = x.shape[1]
    for token in numba.prange(x.shape[0]):
        if has_post:
            scale = _inverse_rms(delta[token], 0, size, eps)
            for d in range(size):
                x[token, d] += delta[token, d] * scale * post[d]
        else:
            for d in range(size):
                x[token, d] += delta[token, d]
        scale = _inverse_rms(x[token], 0, size, eps)
        for d in range(size):
            out[token, d] = x[token, d] * scale * weight[d]


@numba.njit(nogil=True, fastmath=_ROW_MATH)
def _norm_and_rotate(row, start, size, weight, has_norm, cos, sin, position, eps, out):  # type: ignore[no-untyped-def]  # numba infers the types
    half = cos.shape[1]
    if has_norm:
        scale = _inverse_rms(row, start, size, eps)
        for d in range(half):
            low = row[start + d] * scale * weight[d]
            high = row[start + half + d] * scale * weight[half + d]
            out[d] = low * cos[position, d] - high * sin[position, d]
            out[half + d] = high * cos[position, d] + low * sin[position, d]
        for d in range(2 * half, size):
            out[d] = row[start + d] * scale * weight[d]
    else:
        for d in range(half):
            low = row[start + d]
            high = row[start + half + d]
            out[d] = low * cos[position, d] - high * sin[position, d]
            out[half + d] = high * cos[position, d] + low * sin[position, d]
        for d in range(2 * half, size):
            out[d] = row[start + d]


@numba.njit(nogil=True, parallel=True, cache=True, fastmath=_ROW_MATH)
def _store_qkv_int8(  # type: ignore[no-untyped-def]  # numba infers the types
    qkv, query_norm, key_norm, has_norm, cos, sin, positions, blocks, offsets, eps, kv, scales, query
):
    num_heads, num_kv_heads, size = query.shape[1], kv.shape[2], query.shape[2]
    for token in numba.prange(qkv.shape[0]):
        row, position, block, offset = qkv[token], positions[token], blocks[token], offsets[token]
        key = np.empty(size, np.float32)
        for head in range(num_heads):
            _norm_and_rotate(row, head * size, size, query_norm, has_norm, cos, sin, position, eps, query[token, head])
        for head in range(num_kv_heads):
            start = (num_heads + head) * size
            _norm_and_rotate(row, start, size, key_norm, has_norm, cos, sin, position, eps, key)
            scales[block, 0, head, offset] = quantize_row(key, 0, kv[block, 0, head, offset, :size])
            start = (num_heads + num_kv_heads + head) * size
            scales[block, 1, head, offset] = quantize_row(row, start, kv[block, 1, head, offset, :size])


@numba.njit(nogil=True, parallel=True, cache=True, fastmath=_ROW_MATH)
def _store_qkv_fp16(  # type: ignore[no-untyped-def]  # numba infers the types
    qkv, query_norm, key_norm, has_norm, cos, sin, positions, blocks, offsets, eps, kv, query
):
    # kv as the bits of its halves.
    num_heads, num_kv_heads, size = query.shape[1], kv.shape[2], query.shape[2]
    for token in numba.prange(qkv.shape[0]):
        row, position, block, offset = qkv[token], positions[token], blocks[token], offsets[token]
        bits = np.empty(size, np.uint32)
        values = bits.view(np.float32)
        for head in range(num_heads):
            _norm_and_rotate(row, head * size, size, query_norm, has_norm, cos, sin, position, eps, query[token, head])
        for head in range(num_kv_heads):
            start = (num_heads + head) * size
            _norm_and_rotate(row, start, size, key_norm, has_norm, cos, sin, position, eps, values)
            encode_halves(values, bits, kv[block, 0, head, offset])
            start = (num_heads + num_kv_heads + head) * size
            for d in range(size):
                values[d] = row[start + d]
            encode_halves(values, bits, kv[block, 1, head, offset])


@numba.njit(nogil=True, parallel=True, cache=True, fastmath=_ROW_MATH)
def _store_qkv(  # type: ignore[no-untyped-def]  # numba infers the types
    qkv, query_norm, key_norm, has_norm, cos, sin, positions, blocks, offsets, eps, kv, query
):
    num_heads, num_kv_heads, size = query.shape[1], kv.shape[2], kv.shape[4]
    for token in numba.prange(qkv.shape[0]):
        row, position, block, offset = qkv[token], positions[token], blocks[token], offsets[token]
        for head in range(num_heads):
            _norm_and_rotate(row, head * size, size, query_norm, has_norm, cos, sin, position, eps, query[token, head])
        for head in range(num_kv_heads):
            start = (num_heads + head) * size
            _norm_and_rotate(row, start, size, key_norm, has_norm, cos, sin, position, eps, kv[block, 0, head, offset])
            start = (num_heads + num_kv_heads + head) * size
            for d in range(size):
                kv[block, 1, head, offset, d] = row[start + d]


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def _silu_times(gate_up, out):  # type: ignore[no-untyped-def]  # numba infers the types
    size = out.shape[1]
    for token in numba.prange(out.shape[0]):
        for d in range(size):
            gate = gate_up[token, d]
            out[token, d] = gate / (_ONE + exp32(-gate)) * gate_up[token, size + d]


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def _gelu_times(gate_up, out):  # type: ignore[no-untyped-def]  # numba infers the types
    # 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
    size = out.shape[1]
    for token in numba.prange(out.shape[0]):
        for d in range(size):
            gate = gate_up[token, d]
            twice = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
            out[token, d] = gate / (_ONE + exp32(-twice)) * gate_up[token, size + d]


_ACTIVATIONS = {
    Activation.SILU: _silu_times,
    Activation.GELU_TANH: _gelu_times,
    Activation.SWIGLU_CLAMPED: swiglu_clamped,
}


@numba.njit(nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _largest_magnitude(x, row):  # type: ignore[no-untyped-def]  # numba infers the types
    peak = np.float32(1e-12)
    for d in range(x.shape[1]):
        peak = max(peak, abs(x[row, d]))
    return peak


@numba.njit(nogil=True, fastmath=_ROW_MATH)
def _divide_row(x, largest, out, row):  # type: ignore[no-untyped-def]  # numba infers the types
    # A row with NaN or inf is divided by NaN, so that it shows.
    total = np.float32(0.0)
    for d in range(x.shape[1]):
        total += x[row, d]
    divisor = _largest_magnitude(x, row) + total * np.float32(0.0)
    largest[row, 0] = divisor
    for d in range(x.shape[1]):
        out[row, d] = x[row, d] / divisor


@numba.njit(nogil=True, cache=True)
def _divide_few_rows(x, largest, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in range(x.shape[0]):
        _divide_row(x, largest, out, row)


@numba.njit(nogil=True, parallel=True, cache=True)
def _divide_many_rows(x, largest, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for row in numba.prange(x.shape[0]):
        _divide_row(x, largest, out, row)


def divide_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, K] with each row divided by its largest magnitude, and these [T, 1]; fp32."""
    out, largest = torch.empty_like(x), torch.empty(x.shape[0], 1)
    kernel = _divide_many_rows if x.numel() > _PARALLEL_VALUES else _divide_few_rows
    kernel(x.numpy(), largest.numpy(), out.numpy())
    return out, largest


class NumbaOps:
    """Ops on CPU tensors, fp32."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops.norm."""
        out = torch.empty_like(x)
        _norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, post: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops.add_norm."""
        out = torch.empty_like(x)
        post_weight = _ABSENT if post is None else post.numpy()
        _add_norm(x.numpy(), delta.numpy(), post_weight, post is not None, weight.numpy(), np.float32(eps), out.numpy())
        return out

    def store_qkv(
        self, qkv: torch.Tensor, parameters: QKVParameters, kv: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """See Ops.store_qkv."""
        query = torch.empty(qkv.shape[0], parameters.num_heads, parameters.head_dim)
        place = step.groups[parameters.group]
        has_norm = parameters.query_norm is not None
        inputs = (
            qkv.numpy(),
            _ABSENT if parameters.query_norm is None else parameters.query_norm.numpy(),
            _ABSENT if parameters.key_norm is None else parameters.key_norm.numpy(),
            has_norm,
            parameters.cos.numpy(),
            parameters.sin.numpy(),
            step.positions,
            place.token_blocks,
            place.token_offsets,
            np.float32(parameters.eps),
        )
        if kv.dtype == torch.int8:
            _store_qkv_int8(*inputs, kv.numpy(), row_scales(kv, parameters.head_dim).numpy(), query.numpy())
        elif kv.dtype == torch.float16:
            _store_qkv_fp16(*inputs, kv.view(torch.uint16).numpy(), query.numpy())
        else:
            _store_qkv(*inputs, kv.numpy(), query.numpy())
        return query

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See Ops.activate."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _ACTIVATIONS[activation](gate_up.numpy(), out.numpy())
        return out

    def route(self, logits: torch.Tensor, top_k: int, kind: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops.route."""
        weights = torch.empty(logits.shape[0], top_k)
        chosen = torch.empty(logits.shape[0], top_k, dtype=torch.int64)
        choose_experts(logits.numpy(), kind is Router.NORMALISED, chosen.numpy(), weights.numpy())
        return weights, chosen

    def add_weighted(self, out: torch.Tensor, part: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Ops.add_weighted."""
        add_weighted_rows(out.numpy(), part.numpy(), weights.numpy(), tokens.numpy())
