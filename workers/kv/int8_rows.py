"""KV in 8 bits: a row is one head's key or value of one token, with a scale of its own.

A row holds head_dim values from -127 to 127 and then, at the next multiple of 4 bytes, its scale in fp32; what is left
up to a multiple of 8 bytes is 0. A value is its number times the scale; the scale is the row's largest magnitude / 127,
so a row depends on nothing but its own token. Rows are moved whole, so copies and transfers never look inside.
"""

import torch

INT8_MAX = 127.0
_SCALE_BYTES = 4


def int8_row_bytes(head_dim: int) -> int:
    """Return the length of a row."""
    return -(-(scale_offset(head_dim) + _SCALE_BYTES) // 8) * 8


def scale_offset(head_dim: int) -> int:
    """Return where the scale lies in a row, in bytes."""
    return -(-head_dim // _SCALE_BYTES) * _SCALE_BYTES


def row_scales(kv: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the scales of int8 KV [..., row] as a view, fp32 [...]."""
    return kv.view(torch.float32)[..., scale_offset(head_dim) // _SCALE_BYTES]


def quantize_rows(values: torch.Tensor) -> torch.Tensor:
    """Return int8 rows [..., row] of fp32 values [..., D]."""
    head_dim = values.shape[-1]
    peaks = values.abs().amax(dim=-1)
    rows = torch.zeros((*values.shape[:-1], int8_row_bytes(head_dim)), dtype=torch.int8, device=values.device)
    inverse = torch.where(peaks > 0, INT8_MAX / peaks, 0.0)
    rows[..., :head_dim] = torch.round(values * inverse[..., None]).to(torch.int8)
    row_scales(rows, head_dim).copy_(peaks / INT8_MAX)
    return rows


def dequantize_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return fp32 values [..., D] of int8 rows [..., row]."""
    return rows[..., :head_dim].float() * row_scales(rows, head_dim)[..., None]
