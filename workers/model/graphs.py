"""CUDA graphs of decode steps: the launches of a whole forward pass, captured once per padded batch size, and replayed.

A decode step of few rows is bound by launches. Rows are padded to the next captured size; padding rows read and write
a block of their own, one past the pool's. Which size, and what pads, is pure (tested on a
CPU); the capture runs on a GPU only, and has not yet: where it fails, steps run as before and the reason is logged.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdserve.cluster.base.errors import first_line
from pdserve.workers.attention.protocol import GroupTensors, StepMetadata, StepTensors, build_metadata
from pdserve.workers.engine.plan import ForwardPlan, Int32
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.loader import ForwardModel

logger = logging.getLogger(__name__)

WARM_RUNS = 2
"""Before a capture: libraries choose kernels and take workspaces in their first runs."""


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: powers of two to 8, then multiples of 8 to 64, of 32 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_rows + 32, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest captured size that holds so many rows; None if there is none."""
    return next((size for size in sizes if size >= num_rows), None)


def is_decode(plan: ForwardPlan, logits_indices: Int32) -> bool:
    """True if a plan is one token of each row, in order, and all of them are sampled from: what a graph computes."""
    is_one_each = plan.num_tokens == plan.num_rows
    return is_one_each and len(logits_indices) == plan.num_rows and bool((np.diff(logits_indices) == 1).all())


def pad_plan(plan: ForwardPlan, size: int, null_blocks: Sequence[int], num_blocks: int) -> ForwardPlan:
    """Return a decode plan of `size` rows over tables of `num_blocks`: the plan's rows, then rows of the null blocks.

    Args:
        null_blocks: of each KV group, the block that what pads may read and write.
    """
    num_missing = size - plan.num_rows

    def padded(array: Int32) -> Int32:
        return np.concatenate([array, np.zeros(num_missing, np.int32)])

    tables = []
    for table, null in zip(plan.block_tables, null_blocks, strict=True):
        whole = np.full((size, num_blocks), null, np.int32)
        width = min(num_blocks, table.shape[1])
        # What is behind a window, or beyond a row, is read by nobody, but looked up by whole tiles.
        whole[: plan.num_rows, :width] = np.where(table[:, :width] < 0, null, table[:, :width])
        tables.append(whole)
    return ForwardPlan(
        token_ids=padded(plan.token_ids),
        positions=padded(plan.positions),
        row_starts=np.arange(size + 1, dtype=np.int32),
        block_tables=tuple(tables),
    )


class _Graph:
    """One captured size: its inputs, the graph, and its output."""

    def __init__(self, token_ids: torch.Tensor, step: StepMetadata) -> None:
        self.token_ids = token_ids
        self.step = step
        self.graph = torch.cuda.CUDAGraph()
        self.hidden: torch.Tensor | None = None


class GraphedDecoder:
    """A model whose decode steps are replayed. See ForwardModel; used by one thread."""

    def __init__(
        self, model: ForwardModel, store: KVStore, windows: tuple[int, ...], *, max_rows: int, max_tokens: int
    ) -> None:
        """`store` has one block more per group than the pool; `max_tokens` is the longest text."""
        self._model = model
        self._store = store
        self._windows = windows
        self._device = store.layer(0).device
        self._sizes = graph_sizes(max_rows)
        self._num_blocks = -(-max_tokens // store.block_size)
        self._null_blocks = tuple(count - 1 for count in store.num_blocks)
        self._graphs: dict[int, _Graph] = {}

    def capture(self) -> None:
        """Capture every size, the largest first: smaller ones share its memory. On the thread that will replay."""
        pool = None
        for size in reversed(self._sizes):
            try:
                graph = self._capture(size, pool)
            except RuntimeError as error:
                logger.warning("no CUDA graph of %d rows: %s", size, first_line(error))
                continue
            self._graphs[size] = graph
            pool = graph.graph.pool()

    def _capture(self, size: int, pool: Any) -> _Graph:
        plan = self._empty_plan(size)
        step = build_metadata(plan, self._windows, self._store.block_size)
        tensors = step.tensors(self._device)
        token_ids = torch.zeros(size, dtype=torch.long, device=self._device)
        graph = _Graph(token_ids, step)
        outputs = torch.arange(size, device=self._device)
        assert tensors.max_queries == 1, "a decode"

        def run() -> torch.Tensor:
            return self._model.forward(token_ids, step, self._store, outputs)

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has no types here
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        with torch.cuda.graph(graph.graph, pool=pool):
            graph.hidden = run()
        return graph

    def _empty_plan(self, size: int) -> ForwardPlan:
        """Return rows of the longest text, all of them padding: kernels choose their grids by what they are told."""
        last = np.full(size, self._num_blocks * self._store.block_size - 1, np.int32)
        tables = tuple(np.full((size, self._num_blocks), null, np.int32) for null in self._null_blocks)
        return ForwardPlan(
            token_ids=np.zeros(size, np.int32),
            positions=last,
            row_starts=np.arange(size + 1, dtype=np.int32),
            block_tables=tables,
        )

    def replay(self, plan: ForwardPlan, logits_indices: Int32) -> torch.Tensor | None:
        """Return the hidden states [S, H] of a decode step; None if no graph holds it."""
        size = padded_size(plan.num_rows, sorted(self._graphs))
        if size is None or not is_decode(plan, logits_indices):
            return None
        graph = self._graphs[size]
        padded = pad_plan(plan, size, self._null_blocks, self._num_blocks)
        fresh = build_metadata(padded, self._windows, self._store.block_size).tensors(self._device)
        graph.token_ids.copy_(torch.from_numpy(padded.token_ids).to(self._device, torch.long, non_blocking=True))
        overwrite(graph.step.tensors(self._device), fresh)
        graph.graph.replay()
        assert graph.hidden is not None, "captured"
        return graph.hidden[: plan.num_rows].clone()


def overwrite(held: StepTensors, fresh: StepTensors) -> None:
    """Copy a step's values over those that a graph reads; all have the same shapes."""
    for name in ("positions", "row_starts", "kv_lengths", "item_rows", "item_starts", "item_ends"):
        getattr(held, name).copy_(getattr(fresh, name), non_blocking=True)
    for group, other in zip(held.groups, fresh.groups, strict=True):
        _overwrite_group(group, other)


def _overwrite_group(held: GroupTensors, fresh: GroupTensors) -> None:
    held.block_table.copy_(fresh.block_table, non_blocking=True)
    held.token_blocks.copy_(fresh.token_blocks, non_blocking=True)
    held.token_offsets.copy_(fresh.token_offsets, non_blocking=True)
