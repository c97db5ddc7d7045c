"""Ships the KV of prefills while the forward pass computes it.

`KVExporter` is called by the engine thread at each step and each layer; it announces chunks to the sender of the
prefill's link and never waits. The blocks of an announced chunk are pinned until it is gathered or dropped, so the
sequence may end, or be put back, meanwhile (I4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.kvtransfer.layout import ChunkRange, LayerSpan, chunk_bytes, chunks_of, first_sent, layer_spans
from pdserve.kvtransfer.sender import ChunkSender
from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.plan import Int32
from pdserve.workers.engine.scheduler import PlannedPrefill
from pdserve.workers.kv.copy import BlockCopier


@dataclass(slots=True, kw_only=True)
class Export:
    """One prefill whose KV goes to a sink. `sender` is absent if nothing is shipped."""

    transfer: TransferId
    num_tokens: int
    num_held: int
    sender: ChunkSender | None
    is_void: bool = False
    """Set by the I/O loop when the transfer ends."""
    has_started: bool = False
    num_computed: int = 0
    num_chunks: int = 0
    """Chunks announced so far."""
    sent_until: dict[LayerSpan, int] = field(default_factory=dict)


class _ExportedChunk:
    """One announced chunk; see OutgoingChunk."""

    def __init__(
        self, export: Export, chunk: ChunkRange, num_bytes: int, blocks: Int32, copier: BlockCopier, pool: BlockPool
    ) -> None:
        """`blocks` is the table of the chunk's group, complete up to its last token."""
        self.transfer = export.transfer
        self.range = chunk
        self.num_bytes = num_bytes
        self._export = export
        self._blocks = blocks
        self._copier = copier
        self._pool = pool
        self._pinned = blocks[chunk.first_token // copier.layout.block_size :]
        pool.pin(chunk.group, self._pinned)

    @property
    def is_void(self) -> bool:
        return self._export.is_void

    def gather(self, buffer: memoryview) -> int:
        return self._copier.gather(self.range, self._blocks, buffer)

    def release(self) -> None:
        self._pool.unpin(self.range.group, self._pinned)


class KVExporter:
    """Knows the exports of a worker. See KVExports; `begin_step` and `layer_done` run on the engine thread."""

    def __init__(
        self,
        copier: BlockCopier,
        pool: BlockPool,
        *,
        slot_bytes: int,
        on_start: Callable[[TransferId], None],
    ) -> None:
        """`on_start` is called when the engine computes an export for the first time; it must not block."""
        self._copier = copier
        self._pool = pool
        self._on_start = on_start
        self._exports: dict[RequestId, Export] = {}
        self._spans: dict[int, list[LayerSpan]] = {}
        for span in layer_spans(copier.layout, slot_bytes):
            self._spans.setdefault(span.last_layer, []).append(span)
        self._step: list[_StepExport] = []

    def __len__(self) -> int:
        """Exports known."""
        return len(self._exports)

    def add(self, request_id: RequestId, export: Export) -> None:
        """Ship what the engine computes for this request; from the I/O loop, before the request is submitted."""
        self._exports[request_id] = export

    def remove(self, request_id: RequestId) -> None:
        """Ship nothing more of it; from the I/O loop."""
        export = self._exports.pop(request_id, None)
        if export is not None:
            export.is_void = True

    def begin_step(self, prefills: Sequence[PlannedPrefill]) -> bool:
        """See KVExports."""
        self._step = []
        for prefill in prefills:
            export = self._exports.get(prefill.request_id)
            if export is None:
                continue
            export.num_computed = prefill.first_token
            if not export.has_started:
                export.has_started = True
                self._on_start(export.transfer)
            if export.sender is not None:
                tables = [np.array(blocks, np.int32) for blocks in prefill.blocks]
                self._step.append(_StepExport(export, export.sender, prefill.end_token, tables))
        return bool(self._step)

    def layer_done(self, layer: int) -> None:
        """See KVExports."""
        for span in self._spans.get(layer, ()):
            for step in self._step:
                if not step.export.is_void:
                    self._announce(step, span)

    def _announce(self, step: "_StepExport", span: LayerSpan) -> None:
        export, layout = step.export, self._copier.layout
        # What was cached here is shipped with the first step; a prefill that was put back computes again what was
        # shipped already.
        first = max(export.sent_until.get(span, 0), first_sent(layout, span.group, export.num_tokens, export.num_held))
        if first >= step.end_token:
            return
        for chunk in chunks_of(span, first, step.end_token):
            last_block = (chunk.end_token - 1) // layout.block_size
            blocks = step.tables[span.group][: last_block + 1]
            export.num_chunks += 1
            step.sender.submit(
                _ExportedChunk(export, chunk, chunk_bytes(layout, chunk), blocks, self._copier, self._pool)
            )
        export.sent_until[span] = step.end_token


@dataclass(frozen=True, slots=True)
class _StepExport:
    """What one step computes of one export; `tables` are its block tables, one per group."""

    export: Export
    sender: ChunkSender
    end_token: int
    tables: list[Int32]
