"""The attention protocol, and the metadata that all layers of a step share.

Shape letters: T tokens, R rows, I work items, Hq query heads, Hkv KV heads, D head size, N blocks, B block size.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pdserve.workers.engine.plan import ForwardPlan, Int32

QUERY_TILE = 8
"""Query tokens of one row that share a pass over its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """Where the tokens of a step live in one KV group."""

    block_table: Int32
    """[R, blocks]"""
    token_blocks: Int32
    """[T] block that holds each token."""
    token_offsets: Int32
    """[T] offset of each token in its block."""
    window: int
    """Tokens a query sees, itself included; 0 means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """Built once per step."""

    positions: Int32
    """[T]"""
    row_starts: Int32
    """[R + 1]"""
    item_rows: Int32
    """[I] row of each work item: a run of at most QUERY_TILE query tokens of one row."""
    item_starts: Int32
    """[I] first token of each work item."""
    item_ends: Int32
    """[I] one past its last token."""
    groups: tuple[GroupMetadata, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParameters:
    """What a layer's attention does besides the softmax of scale * query · key."""

    group: int
    """Its KV group, which has a window or none."""
    scale: float
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: they stay."""
    sinks: torch.Tensor | None = None
    """[Hq] fp32: logits that take part in each head's softmax and have no value."""


class AttentionBackend(Protocol):
    """Attention over the paged KV of one layer."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """Return [T, Hq * D] for query [T, Hq, D] over kv [N, 2, Hkv, B, row] (KVStore); causal."""


def build_metadata(plan: ForwardPlan, windows: tuple[int, ...], block_size: int) -> StepMetadata:
    """Derive the metadata of a plan; `windows` is one entry per KV group."""
    lengths = np.diff(plan.row_starts)
    rows = np.repeat(np.arange(plan.num_rows, dtype=np.int32), lengths)
    block_numbers = plan.positions // block_size
    offsets = (plan.positions - block_numbers * block_size).astype(np.int32)
    groups = tuple(
        GroupMetadata(block_table=table, token_blocks=table[rows, block_numbers], token_offsets=offsets, window=window)
        for table, window in zip(plan.block_tables, windows, strict=True)
    )
    num_items = -(-lengths // QUERY_TILE)
    item_rows = np.repeat(np.arange(plan.num_rows, dtype=np.int32), num_items)
    first_items = np.cumsum(num_items) - num_items
    tile_numbers = np.arange(len(item_rows)) - first_items[item_rows]
    item_starts = (plan.row_starts[item_rows] + tile_numbers * QUERY_TILE).astype(np.int32)
    item_ends = np.minimum(item_starts + QUERY_TILE, plan.row_starts[item_rows + 1]).astype(np.int32)
    return StepMetadata(
        positions=plan.positions,
        row_starts=plan.row_starts,
        item_rows=item_rows,
        item_starts=item_starts,
        item_ends=item_ends,
        groups=groups,
    )
