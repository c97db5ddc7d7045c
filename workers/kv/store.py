"""The KV store: the only owner of KV bytes, one tensor per layer.

Layout of a layer: [num_blocks, 2, kv_heads, block_size, head_dim], the same on every device. Layers of one KV group
share block ids; groups are separate pools of equal size.
"""

import torch

from pdserve.workers.model.families import ModelSpec


class KVStore:
    """KV tensors of one worker."""

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]

    def layer(self, index: int) -> torch.Tensor:
        """Return the KV of one layer."""
        return self._layers[index]


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one more block in every group costs."""
    return spec.kv_bytes_per_token(dtype.itemsize) * block_size
