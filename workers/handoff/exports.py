"""Ships the KV of prefills while the forward pass of a rank computes it.

`RankExporter` is called by the thread that runs the rank's steps, at each step and each layer; it announces chunks to
the streams of the prefill's pair and never waits. Rank 0 keeps the blocks of a step pinned until every rank has
released what the step announced (export_book.py, I4).
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from pdserve.cluster.base.kv_layout import ChunkRange
from pdserve.cluster.base.transfer_messages import Cargo, TransferId
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.layout import LayerSpan, chunk_bytes, chunks_of, first_sent
from pdserve.workers.engine.plan import Int32
from pdserve.workers.engine.rank_step import ExportedStep
from pdserve.workers.kv.copy import Copier

OnReleased = Callable[[TransferId, int], None]
"""Called on any thread with a transfer and the end token of one of its steps."""
Streams = Mapping[int, ChunkStream]
"""The streams of a pair that begin at this rank, by number."""


class _RankExport:
    """What a rank knows of a transfer, from its first step or its drop on, whichever comes first, until both are done.

    Steps and drops come on two paths: a drop says which step was the last one, so that no step finds it forgotten.
    """

    def __init__(self) -> None:
        self.is_void = False
        self.last_end: int | None = None
        """End token of its last step, once it is dropped."""
        self.begun_end = 0
        """End token of the last step that has begun."""

    @property
    def is_over(self) -> bool:
        """True if no step will name it any more."""
        return self.begun_end == self.last_end


class _AnnouncedStep:
    """What one step announces of one transfer. Released when no chunk of it needs its blocks any more."""

    def __init__(self, step: ExportedStep, export: _RankExport, streams: Streams, on_released: OnReleased) -> None:
        self.step = step
        self.export = export
        self.streams = streams
        self.next_chunks = list(step.first_chunks)
        self._on_released = on_released
        # One for the step itself, until all its layers are announced.
        self._num_references = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """A chunk is announced."""
        with self._lock:
            self._num_references += 1

    def release(self) -> None:
        """A chunk is gathered or dropped, or the step's last layer announced."""
        with self._lock:
            self._num_references -= 1
            is_last = self._num_references == 0
        if is_last:
            self._on_released(self.step.transfer, self.step.end_token)


class _ExportedChunk:
    """One announced chunk; see OutgoingChunk."""

    was_sent = False

    def __init__(
        self,
        announced: _AnnouncedStep,
        stream: ChunkStream,
        chunk_no: int,
        chunk: ChunkRange,
        copier: Copier,
        mark: object,
    ) -> None:
        """`mark` is the copier's, of when the chunk's layers were written."""
        self.transfer = announced.step.transfer
        self.num_bytes = chunk_bytes(stream.stream, chunk)
        self._announced = announced
        self._stream = stream
        self._chunk_no = chunk_no
        self._range = chunk
        self._copier = copier
        self._mark = mark
        announced.hold()

    @property
    def is_void(self) -> bool:
        return self._announced.export.is_void

    def load(self, buffer: memoryview) -> Cargo:
        blocks: Int32 = self._announced.step.blocks[self._range.group]
        checksum = self._copier.gather(self._range, blocks, buffer, self._stream.stream.wire_dtype, self._mark)
        return Cargo(transfer=self.transfer, chunk_no=self._chunk_no, range=self._range, checksum=checksum)

    def release(self) -> None:
        self._announced.release()


class RankExporter:
    """Knows the transfers that a rank ships. `begin_step` and `layer_done` run on the thread of the rank's steps."""

    def __init__(self, copier: Copier, streams_of: Callable[[int], Streams], on_released: OnReleased) -> None:
        """`streams_of` returns the streams of a pair, none if it is gone; called on the thread of the steps."""
        self._copier = copier
        self._layout = copier.layout
        self._streams_of = streams_of
        self._on_released = on_released
        self._exports: dict[TransferId, _RankExport] = {}
        self._lock = threading.Lock()
        self._step: list[_AnnouncedStep] = []

    def __len__(self) -> int:
        """Transfers known."""
        return len(self._exports)

    def drop(self, transfer: TransferId, last_end: int) -> None:
        """Ship nothing more of it; `last_end` is the end token of the last step that names it, begun or not.

        Every transfer that a step names is dropped once; from the loop.
        """
        with self._lock:
            export = self._exports.setdefault(transfer, _RankExport())
            export.is_void = True
            export.last_end = last_end
            if export.is_over:
                del self._exports[transfer]

    def begin_step(self, exported: Sequence[ExportedStep]) -> bool:
        """Learn what the step computes of which transfers; True if layers should be announced."""
        self._step = [
            _AnnouncedStep(step, self._export_of(step), self._streams_of(step.pair_no), self._on_released)
            for step in exported
        ]
        return bool(self._step)

    def _export_of(self, step: ExportedStep) -> _RankExport:
        with self._lock:
            export = self._exports.setdefault(step.transfer, _RankExport())
            export.begun_end = step.end_token
            if export.is_over:
                del self._exports[step.transfer]
            return export

    def layer_done(self, layer: int) -> None:
        """The step's KV of this layer is in the store."""
        mark = self._copier.mark() if self._step else None
        for announced in self._step:
            for stream in announced.streams.values():
                for span in stream.spans.get(layer, ()):
                    if not announced.export.is_void:
                        self._announce(announced, stream, span, mark)
        if layer == self._layout.num_layers - 1:
            step, self._step = self._step, []
            for announced in step:
                announced.release()

    def _announce(self, announced: _AnnouncedStep, stream: ChunkStream, span: LayerSpan, mark: object) -> None:
        step = announced.step
        # What was cached is shipped with the first step.
        first = max(step.send_from, first_sent(self._layout, span.group, step.num_tokens, step.num_sink_tokens))
        for chunk in chunks_of(stream.stream, span, first, step.end_token):
            chunk_no = announced.next_chunks[stream.number]
            announced.next_chunks[stream.number] += 1
            stream.submit(_ExportedChunk(announced, stream, chunk_no, chunk, self._copier, mark))
