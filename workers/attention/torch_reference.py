"""Reference attention in plain torch, on any device: gathers each row's KV and calls scaled_dot_product_attention.

Tolerance class: the library chooses its order of additions by shape.
"""

import torch

from pdserve.workers.attention.protocol import StepMetadata
from pdserve.workers.kv.rows import decode_rows


class TorchAttention:
    """The reference backend."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, group: int, scale: float
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        place = step.groups[group]
        block_size = kv.shape[3]
        out = torch.empty_like(query)
        for row in range(len(step.row_starts) - 1):
            start, end = int(step.row_starts[row]), int(step.row_starts[row + 1])
            length = int(step.positions[end - 1]) + 1
            num_blocks = -(-length // block_size)
            blocks = torch.from_numpy(place.block_table[row, :num_blocks]).to(kv.device, torch.long)
            # [blocks, 2, heads, block_size, size] → [2, heads, tokens, size]
            history = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            if kv.dtype != query.dtype:
                history = decode_rows(history.contiguous(), query.shape[2])
            positions = torch.from_numpy(step.positions[start:end]).to(kv.device, torch.long)[:, None]
            keys = torch.arange(length, device=kv.device)[None, :]
            is_visible = keys <= positions
            if place.window > 0:
                is_visible &= keys > positions - place.window
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[start:end].transpose(0, 1)[None],
                history[0][None],
                history[1][None],
                attn_mask=is_visible,
                scale=scale,
                enable_gqa=True,
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out.view(query.shape[0], -1)
