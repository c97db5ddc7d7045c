"""Reference attention in plain torch, on any device: gathers each row's KV, then softmax of scores and a product.

Tolerance class: the library chooses its order of additions by shape.
"""

import torch

from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata
from pdserve.workers.kv.rows import decode_rows


class TorchAttention:
    """The reference backend."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        place = step.groups[parameters.group]
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
            out[start:end] = _attend_row(query[start:end], history, is_visible, parameters)
        return out.view(query.shape[0], -1)


def _attend_row(
    query: torch.Tensor, history: torch.Tensor, is_visible: torch.Tensor, parameters: AttentionParameters
) -> torch.Tensor:
    """Return [t, Hq, D] for query [t, Hq, D], history [2, Hkv, L, D] and is_visible [t, L]."""
    if parameters.softcap == 0.0 and parameters.sinks is None:
        attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            history[0][None],
            history[1][None],
            attn_mask=is_visible,
            scale=parameters.scale,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1)
    keys, values = history.repeat_interleave(query.shape[1] // history.shape[1], dim=1)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * parameters.scale
    if parameters.softcap:
        scores = parameters.softcap * torch.tanh(scores / parameters.softcap)
    scores = scores.masked_fill(~is_visible, float("-inf"))
    if parameters.sinks is not None:
        sinks = parameters.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out: torch.Tensor = weights @ values
    return out.transpose(0, 1)
