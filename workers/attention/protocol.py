"""The attention protocol, and the metadata that all layers of a step share.

Shape letters: T tokens, R rows, I work items, Hq query heads, Hkv KV heads, D head size, N blocks, B block size.
"""

from dataclasses import dataclass, field
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
class GroupTensors:
    """GroupMetadata on a device."""

    block_table: torch.Tensor
    """int32 [R, blocks]"""
    token_blocks: torch.Tensor
    """int64 [T]"""
    token_offsets: torch.Tensor
    """int64 [T]"""
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """StepMetadata on a device."""

    positions: torch.Tensor
    """int64 [T]"""
    row_starts: torch.Tensor
    """int32 [R + 1]"""
    kv_lengths: torch.Tensor
    """int32 [R] tokens that the last query token of each row sees if there is no window."""
    item_rows: torch.Tensor
    item_starts: torch.Tensor
    item_ends: torch.Tensor
    """int32 [I] each"""
    max_queries: int
    """Query tokens of the longest row."""
    max_kv: int
    """At least the largest of kv_lengths."""
    groups: tuple[GroupTensors, ...]


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
    _on_device: list[StepTensors] = field(default_factory=list, compare=False, repr=False)
    """What `tensors` has made."""

    def tensors(self, device: torch.device) -> StepTensors:
        """Return the same on the device of the model; moved once per step, for all layers."""
        if not self._on_device:
            self._on_device.append(move_step(self, device))
        return self._on_device[0]


def move_step(step: StepMetadata, device: torch.device) -> StepTensors:
    """Copy a step's metadata to a device, without waiting for it."""

    def moved(array: Int32, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(device, dtype, non_blocking=True)

    kv_lengths = step.positions[step.row_starts[1:] - 1] + 1
    return StepTensors(
        positions=moved(step.positions, torch.long),
        row_starts=moved(step.row_starts, torch.int32),
        kv_lengths=moved(kv_lengths, torch.int32),
        item_rows=moved(step.item_rows, torch.int32),
        item_starts=moved(step.item_starts, torch.int32),
        item_ends=moved(step.item_ends, torch.int32),
        max_queries=int(np.diff(step.row_starts).max(initial=0)),
        max_kv=int(kv_lengths.max(initial=0)),
        groups=tuple(
            GroupTensors(
                # Kernels look at whole tiles: of what no query sees they may load any block, but a block.
                block_table=moved(np.maximum(group.block_table, 0), torch.int32),
                token_blocks=moved(group.token_blocks, torch.long),
                token_offsets=moved(group.token_offsets, torch.long),
                window=group.window,
            )
            for group in step.groups
        ),
    )


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
