"""y = x Wᵀ + b in Triton with fixed tiles, so that a row's bits never depend on its batch (`engine.numerics`).

Every batch, of whatever size, goes through tiles of the same three sizes, and a tile adds along K from its beginning to
its end: no split, no choice by shape. What a row meets is the same, wherever it stands (He and Thinking Machines 2025,
"Defeating nondeterminism in LLM inference"). Tested in Triton's interpreter; not measured on a GPU yet.
"""

import torch
import triton
import triton.language as tl

TILE_ROWS = 16
"""The least of a tensor core: decodes waste little."""
TILE_OUT = 64
TILE_IN = 64


@triton.jit  # type: ignore[untyped-decorator]  # it has no types
def _multiply(  # type: ignore[no-untyped-def]  # Triton compiles it
    x,
    weight,
    bias,
    out,
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row, is_column = row < num_rows, column < out_features
    sums = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    first = 0
    while first < in_features:
        place = first + tl.arange(0, TILE_IN)
        is_place = place < in_features
        left = tl.load(
            x + row[:, None] * x_stride + place[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0
        )
        right = tl.load(
            weight + column[:, None] * weight_stride + place[None, :],
            mask=is_column[:, None] & is_place[None, :],
            other=0.0,
        )
        sums += tl.dot(left, tl.trans(right), input_precision="ieee")
        first += TILE_IN
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], sums, mask=is_row[:, None] & is_column[None, :])


class TiledProduct:
    """The product with one weight. See linear.Product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [N, K] and `bias` [N], in the dtype that x is multiplied in."""
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 [T, N] for x [T, K]."""
        x = x.to(self._weight.dtype).contiguous()
        num_rows, out_features = x.shape[0], self._weight.shape[0]
        out = torch.empty(num_rows, out_features, dtype=torch.float32, device=x.device)
        if not num_rows:
            return out
        grid = (triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(out_features, TILE_OUT))
        _multiply[grid](
            x,
            self._weight,
            self._weight if self._bias is None else self._bias,
            out,
            num_rows,
            out_features,
            x.shape[1],
            x.stride(0),
            self._weight.stride(0),
            out.stride(0),
            HAS_BIAS=self._bias is not None,
            TILE_ROWS=TILE_ROWS,
            TILE_OUT=TILE_OUT,
            TILE_IN=TILE_IN,
        )
        return out
