"""Rows of KV: one head's key or value of one token, as fp32, fp16 or int8 with a scale of its own.

An int8 row holds head_dim values from -127 to 127 and then, at the next multiple of 4 bytes, its scale in fp32; what is
left up to a multiple of 8 bytes is 0. A value is its number times the scale; the scale is the row's largest
magnitude / 127, so a row depends on nothing but its own token. Copies and transfers between equal dtypes move rows
whole and never look inside.
"""

import torch

from pdserve.cluster.base.kv_layout import KVDtype

INT8_MAX = 127.0
_SCALE_BYTES = 4
TORCH_DTYPES = {
    KVDtype.FLOAT32: torch.float32,
    KVDtype.FLOAT16: torch.float16,
    KVDtype.INT8: torch.int8,
    KVDtype.BFLOAT16: torch.bfloat16,
    KVDtype.FLOAT8: torch.float8_e4m3fn,
}


def row_scales(kv: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the scales of int8 KV [..., row] as a view, fp32 [...]."""
    return kv.view(torch.float32)[..., -(-head_dim // _SCALE_BYTES)]


def quantize_rows(values: torch.Tensor) -> torch.Tensor:
    """Return int8 rows [..., row] of fp32 values [..., D]."""
    head_dim = values.shape[-1]
    peaks = values.abs().amax(dim=-1)
    shape = (*values.shape[:-1], KVDtype.INT8.row_bytes(head_dim))
    rows = torch.zeros(shape, dtype=torch.int8, device=values.device)
    inverse = torch.where(peaks > 0, INT8_MAX / peaks, 0.0)
    rows[..., :head_dim] = torch.round(values * inverse[..., None]).to(torch.int8)
    row_scales(rows, head_dim).copy_(peaks / INT8_MAX)
    return rows


def dequantize_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return fp32 values [..., D] of int8 rows [..., row]."""
    return rows[..., :head_dim].float() * row_scales(rows, head_dim)[..., None]


def encode_rows(values: torch.Tensor, kv_dtype: KVDtype) -> torch.Tensor:
    """Return rows [..., row] of fp32 values [..., D]. What fp16 cannot hold becomes infinite: its request will end."""
    return quantize_rows(values) if kv_dtype is KVDtype.INT8 else values.to(TORCH_DTYPES[kv_dtype])


def decode_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return fp32 values [..., D] of rows [..., row]."""
    return dequantize_rows(rows, head_dim) if rows.dtype is torch.int8 else rows.float()
