"""The KV store: the only owner of KV bytes, one tensor per layer.

Layout of a layer: [num_blocks, 2, kv_heads, block_size, head_dim], the same on every device. Layers of one KV group
share block ids; groups are separate pools of equal size.
"""

import torch

from pdserve.cluster.base.kv_layout import KVLayout

_DTYPES = {"float32": torch.float32}


class KVStore:
    """KV tensors of one worker."""

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        shape = (num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = _DTYPES[layout.kv_dtype]
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]

    def layer(self, index: int) -> torch.Tensor:
        """Return the KV of one layer."""
        return self._layers[index]


def block_bytes(layout: KVLayout) -> int:
    """Return the bytes that one more block in every group costs."""
    return layout.num_layers * layout.token_bytes * layout.block_size
