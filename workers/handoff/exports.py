"""Ships the KV of prefills while the forward pass computes it.

`KVExporter` is called by the engine thread at each step and each layer; it announces chunks to the streams of the
prefill's pair and never waits. The blocks of an announced chunk are pinned until it is gathered or dropped, so the
sequence may end, or be put back, meanwhile (I4).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import ChunkRange, KVLayout
from pdserve.cluster.base.transfer_messages import Cargo, TransferId
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.layout import LayerSpan, chunk_bytes, chunks_of, first_sent
from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.plan import Int32
from pdserve.workers.engine.scheduler import PlannedPrefill
from pdserve.workers.kv.copy import BlockCopier


@dataclass(slots=True, kw_only=True)
class Export:
    """One prefill whose KV goes to a sink. There are no streams if nothing is shipped."""

    transfer: TransferId
    num_tokens: int
    num_held: int
    streams: Sequence[ChunkStream]
    is_void: bool = False
    """Set by the I/O loop when the transfer ends."""
    has_started: bool = False
    num_computed: int = 0
    num_chunks: list[int] = field(default_factory=list)
    """Chunks announced so far, in each stream."""
    sent_until: dict[tuple[int, LayerSpan], int] = field(default_factory=dict)
    """By stream and span."""

    def __post_init__(self) -> None:
        self.num_chunks = [0] * len(self.streams)


class _ExportedChunk:
    """One announced chunk; see OutgoingChunk."""

    was_sent = False

    def __init__(
        self,
        export: Export,
        stream: ChunkStream,
        chunk_no: int,
        chunk: ChunkRange,
        blocks: Int32,
        copier: BlockCopier,
        pool: BlockPool,
    ) -> None:
        """`blocks` is the table of the chunk's group, complete up to its last token."""
        self.transfer = export.transfer
        self.num_bytes = chunk_bytes(stream.stream, chunk)
        self._export = export
        self._stream = stream
        self._chunk_no = chunk_no
        self._range = chunk
        self._blocks = blocks
        self._copier = copier
        self._pool = pool
        self._pinned = blocks[chunk.first_token // copier.layout.block_size :]
        pool.pin(chunk.group, self._pinned)

    @property
    def is_void(self) -> bool:
        return self._export.is_void

    def load(self, buffer: memoryview) -> Cargo:
        checksum = self._copier.gather(self._range, self._blocks, buffer, self._stream.stream.wire_dtype)
        return Cargo(transfer=self._export.transfer, chunk_no=self._chunk_no, range=self._range, checksum=checksum)

    def release(self) -> None:
        self._pool.unpin(self._range.group, self._pinned)


class KVExporter:
    """Knows the exports of a worker. See KVExports; `begin_step` and `layer_done` run on the engine thread."""

    def __init__(
        self,
        copiers: Sequence[BlockCopier],
        pool: BlockPool,
        *,
        on_start: Callable[[TransferId], None],
    ) -> None:
        """`copiers` are the ranks'.

        `on_start` is called when the engine computes an export for the first time; it must not block.
        """
        self._copiers = copiers
        self._layout: KVLayout = copiers[0].layout
        self._pool = pool
        self._on_start = on_start
        self._exports: dict[RequestId, Export] = {}
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
            if export.streams:
                tables = [np.array(blocks, np.int32) for blocks in prefill.blocks]
                self._step.append(_StepExport(export, prefill.end_token, tables))
        return bool(self._step)

    def layer_done(self, layer: int) -> None:
        """See KVExports."""
        for step in self._step:
            for stream in step.export.streams:
                for span in stream.spans.get(layer, ()):
                    if not step.export.is_void:
                        self._announce(step, stream, span)

    def _announce(self, step: "_StepExport", stream: ChunkStream, span: LayerSpan) -> None:
        export, layout, key = step.export, self._layout, (stream.number, span)
        # What was cached here is shipped with the first step; a prefill that was put back computes again what was
        # shipped already.
        first = max(export.sent_until.get(key, 0), first_sent(layout, span.group, export.num_tokens, export.num_held))
        if first >= step.end_token:
            return
        copier = self._copiers[stream.stream.source_rank]
        for chunk in chunks_of(stream.stream, span, first, step.end_token):
            last_block = (chunk.end_token - 1) // layout.block_size
            blocks = step.tables[span.group][: last_block + 1]
            chunk_no = export.num_chunks[stream.number]
            export.num_chunks[stream.number] += 1
            stream.submit(_ExportedChunk(export, stream, chunk_no, chunk, blocks, copier, self._pool))
        export.sent_until[key] = step.end_token


@dataclass(frozen=True, slots=True)
class _StepExport:
    """What one step computes of one export; `tables` are its block tables, one per group."""

    export: Export
    end_token: int
    tables: list[Int32]
