"""The KV store: the only owner of KV bytes, one tensor per layer.

Layout of a layer: [num_blocks, 2, kv_heads, block_size, row], the same on every device. A row is head_dim fp32
values, or an int8 row (int8_rows). Layers of one KV group share block ids; groups are separate pools.
"""

from collections.abc import Sequence

import torch

from pdserve.cluster.base.kv_layout import KVDtype, KVLayout
from pdserve.workers.kv.int8_rows import int8_row_bytes

_DTYPES = {KVDtype.FLOAT32: torch.float32, KVDtype.INT8: torch.int8}


class KVStore:
    """KV tensors of one worker."""

    def __init__(self, layout: KVLayout, *, num_blocks: Sequence[int], device: torch.device) -> None:
        """`num_blocks` is one number per KV group."""
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        self.block_size = layout.block_size
        dtype = _DTYPES[KVDtype(layout.kv_dtype)]
        shape = (2, layout.num_kv_heads, layout.block_size, layout.row_bytes // dtype.itemsize)
        counts = {
            layer: count for group, count in zip(layout.groups, num_blocks, strict=True) for layer in group.layers
        }
        self._layers = [
            torch.zeros((counts[layer], *shape), dtype=dtype, device=device) for layer in range(layout.num_layers)
        ]

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block's KV in all layers of a group."""
        for index in self.layout.groups[group].layers:
            self._layers[index][target] = self._layers[index][source]

    def layer(self, index: int) -> torch.Tensor:
        """Return the KV of one layer."""
        return self._layers[index]


def row_bytes(kv_dtype: KVDtype, head_dim: int) -> int:
    """Return the bytes of one head's key or value of one token."""
    return int8_row_bytes(head_dim) if kv_dtype is KVDtype.INT8 else head_dim * _DTYPES[kv_dtype].itemsize


def block_bytes(layout: KVLayout, group: int) -> int:
    """Return the bytes that one more block of a group costs."""
    return len(layout.groups[group].layers) * layout.token_bytes * layout.block_size
