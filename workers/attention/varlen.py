"""Paged attention by torch's own varlen_attn (flash attention over block tables): the base backend on CUDA."""

import torch
from torch.nn.attention.varlen import varlen_attn

from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata


class VarlenAttention:
    """The backend. It knows neither soft caps nor sinks, and KV of the query's dtype only (bf16 or fp16)."""

    def __init__(self, *, is_invariant: bool = False) -> None:
        """`is_invariant`: no split over KV, so that a row's result does not depend on its batch."""
        self._num_splits = 1 if is_invariant else None

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        if parameters.softcap or parameters.sinks is not None:
            raise NotImplementedError("varlen_attn has no soft cap and no sinks")
        tensors = step.tensors(query.device)
        place = tensors.groups[parameters.group]
        # [N, 2, Hkv, B, D] → pages [N, B, Hkv, D]
        keys, values = kv.transpose(2, 3).unbind(1)
        out = varlen_attn(
            query.to(kv.dtype),
            keys,
            values,
            tensors.row_starts,
            None,
            tensors.max_queries,
            tensors.max_kv,
            scale=parameters.scale,
            window_size=(place.window - 1, 0) if place.window else (-1, 0),
            enable_gqa=query.shape[1] != kv.shape[2],
            seqused_k=tensors.kv_lengths,
            block_table=place.block_table,
            num_splits=self._num_splits,
        )
        assert isinstance(out, torch.Tensor), "no auxiliary results were asked for"
        return out.reshape(query.shape[0], -1).to(query.dtype)
