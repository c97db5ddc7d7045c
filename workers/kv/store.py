"""The KV store: the only owner of KV bytes, one tensor per layer.

Layout of a layer: [num_blocks, 2, kv_heads, block_size, row], the same on every device; the heads are those of one
rank, a row is one head's key or value of one token (rows.py). Layers of one KV group share block ids; groups are
separate pools.
"""

from collections.abc import Sequence

import torch

from pdserve.cluster.base.kv_layout import KVDtype, KVLayout
from pdserve.workers.kv.rows import TORCH_DTYPES


class KVStore:
    """KV tensors of one rank of a worker."""

    def __init__(self, layout: KVLayout, *, num_blocks: Sequence[int], device: torch.device, rank: int = 0) -> None:
        """`num_blocks` is one number per KV group."""
        self.layout = layout
        self.rank = rank
        self.num_blocks = tuple(num_blocks)
        self.block_size = layout.block_size
        self.kv_dtype = KVDtype(layout.kv_dtype)
        dtype = TORCH_DTYPES[self.kv_dtype]
        first_head, end_head = layout.heads_of(rank)
        shape = (2, end_head - first_head, layout.block_size, layout.row_bytes // dtype.itemsize)
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


def block_bytes(layout: KVLayout, group: int) -> int:
    """Return the bytes that one more block of a group costs a rank."""
    return len(layout.groups[group].layers) * layout.rank_token_bytes * layout.block_size
