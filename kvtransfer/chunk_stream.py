"""The chunks that one source rank sends to one sink rank, whichever link carries them.

Links come and go, a stream lives as long as its pair: while there is no link, chunks wait here; what a broken link did
not deliver comes back and goes over the next one (fail-over). Any thread may call it.
"""

import threading
from collections import deque
from collections.abc import Iterable

from pdserve.kvtransfer.layout import LayerSpan, Stream
from pdserve.kvtransfer.sender import ChunkSender, OutgoingChunk


class ChunkStream:
    """One stream at its source.

    Attributes:
        number: its place among the streams of its pair.
        spans: for each model layer, the spans that are complete with it.
    """

    def __init__(self, number: int, stream: Stream, spans: Iterable[LayerSpan]) -> None:
        self.number = number
        self.stream = stream
        self.spans: dict[int, list[LayerSpan]] = {}
        for span in spans:
            self.spans.setdefault(span.last_layer, []).append(span)
        self._lock = threading.Lock()
        self._sender: ChunkSender | None = None
        self._waiting: deque[OutgoingChunk] = deque()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for a link."""
        return len(self._waiting)

    def submit(self, chunk: OutgoingChunk) -> None:
        """Send a chunk as soon as there is a link and a slot; released at once if nobody wants it any more."""
        with self._lock:
            # An ended transfer is dropped under the lock, after it was marked: nothing void slips in behind that.
            is_taken = not (self._is_closed or chunk.is_void)
            if is_taken and (self._sender is None or not self._sender.submit(chunk)):
                self._waiting.append(chunk)
        if not is_taken:
            chunk.release()

    def carry_by(self, sender: ChunkSender) -> None:
        """A link has opened: it carries the stream from now on, beginning with what waits."""
        with self._lock:
            self._sender = sender
            while self._waiting and sender.submit(self._waiting[0]):
                self._waiting.popleft()

    def take_back(self, sender: ChunkSender, chunks: list[OutgoingChunk]) -> None:
        """A link has broken: what it did not deliver goes over the next one."""
        with self._lock:
            if self._sender is sender:
                self._sender = None
        for chunk in chunks:
            self.submit(chunk)

    def drop_void(self) -> None:
        """Release the chunks of ended transfers."""
        with self._lock:
            void = [chunk for chunk in self._waiting if chunk.is_void]
            self._waiting = deque(chunk for chunk in self._waiting if not chunk.is_void)
            sender = self._sender
        for chunk in void:
            chunk.release()
        if sender is not None:
            sender.drop_void()

    def close(self) -> None:
        """The pair is over: release what waits, and what still comes."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
            self._sender = None
        for chunk in waiting:
            chunk.release()
