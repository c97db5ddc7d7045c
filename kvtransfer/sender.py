"""The thread of a link's source end: waits for a chunk and a slot, gathers, sends. One per link.

The forward pass only announces chunks (`submit`); it never waits for a slot. A send buffer is held from gathering until
the sink's CREDIT, so a NACK is answered from it. After an abort a chunk that was begun still gets its header, void.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.transfer_messages import Chunk, TransferId
from pdserve.kvtransfer.layout import ChunkRange
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.slots import SlotLedger
from pdserve.kvtransfer.transports.protocol import SendTransport

logger = logging.getLogger(__name__)

MAX_RESENDS = 2


class OutgoingChunk(Protocol):
    """A chunk that is ready to be gathered. Its source blocks hold a reference until `release` (I4)."""

    transfer: TransferId
    range: ChunkRange
    num_bytes: int

    @property
    def is_void(self) -> bool:
        """True once the transfer has ended: nobody wants the bytes."""

    def gather(self, buffer: memoryview) -> int:
        """Copy the bytes; return their checksum."""

    def release(self) -> None:
        """Drop the reference to the blocks."""


class SenderEvents(Protocol):
    """What the sender tells its owner; called on the sender's thread."""

    def chunk_sent(self, header: Chunk, stall_s: float) -> None:
        """A chunk is on its way; it had waited `stall_s` for a slot."""

    def link_broken(self, reason: str) -> None:
        """The link cannot send any more, or a chunk failed its last resend."""


@dataclass(frozen=True, slots=True)
class _Resend:
    header: Chunk


@dataclass(frozen=True, slots=True)
class _Ready:
    chunk: OutgoingChunk
    time: float


class ChunkSender:
    """Owns a link's slots and its thread."""

    def __init__(
        self,
        link_no: int,
        transport: SendTransport,
        ledger: SlotLedger,
        events: SenderEvents,
        clock: Clock,
        *,
        test_bytes: int,
    ) -> None:
        self._link_no = link_no
        self._transport = transport
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._test_bytes = test_bytes
        self._wake = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._resends: deque[_Resend] = deque()
        self._wants_test = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"link {link_no}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, chunk: OutgoingChunk) -> None:
        """Announce a chunk; from any thread. On a closed link it is released at once."""
        with self._wake:
            if not self._is_closing:
                self._ready.append(_Ready(chunk, self._clock.now()))
                self._wake.notify()
                return
        chunk.release()

    def drop_void(self) -> None:
        """Release the chunks of ended transfers now, also while no slot is free."""
        with self._wake:
            void = [item.chunk for item in self._ready if item.chunk.is_void]
            self._ready = deque(item for item in self._ready if not item.chunk.is_void)
        for chunk in void:
            chunk.release()

    def send_test(self) -> None:
        """Send the test pattern as soon as a slot is free."""
        with self._wake:
            self._wants_test = True
            self._wake.notify()

    def credited(self, seq: int, slot: int) -> Chunk:
        """The sink has done with a chunk. Raises ProtocolError for one that is not outstanding."""
        with self._wake:
            header = self._ledger.credited(seq, slot)
            self._wake.notify()
            return header

    def refused(self, seq: int, slot: int) -> None:
        """The sink could not verify a chunk: send it again, or end the link. Raises ProtocolError."""
        with self._wake:
            header = self._ledger.refused(seq, slot)
            if header.num_resends < MAX_RESENDS:
                self._resends.append(_Resend(header))
                self._wake.notify()
            else:
                self._ledger.put_back(slot)
                self._is_closing = True
                self._wake.notify()
                self._events.link_broken(f"a chunk failed {1 + MAX_RESENDS} times")

    def give_back_idle(self) -> None:
        """Return borrowed slots, and their memory, if the link is idle."""
        with self._wake:
            if not self._is_closing and not self._ready and self._ledger.give_back_idle():
                self._transport.trim(self._ledger.num_slots)

    @property
    def is_closing(self) -> bool:
        """True once the link is given up: what the sink says of its chunks means nothing any more."""
        return self._is_closing

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited."""
        return self._ledger.num_outstanding

    @property
    def num_slots(self) -> int:
        """Slots the link holds."""
        return self._ledger.num_slots

    def stalled_for(self) -> float:
        """Return how long the oldest chunk has waited for its credit."""
        with self._wake:
            oldest = self._ledger.oldest_time
        return 0.0 if oldest is None else self._clock.now() - oldest

    def close(self) -> None:
        """Break the link and end the thread; returns at once. What was announced is released by the thread."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._transport.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; True if it ended. A thread that was never started is cleaned up here."""
        if self._thread.ident is None:
            self._clean_up()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def validate(self) -> None:
        """Check the slots; for tests."""
        with self._wake:
            self._ledger.validate()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except OSError as error:
            self._events.link_broken(f"{type(error).__name__}: {error}")
        except Exception as error:
            # The barrier of this thread: its link ends, the process goes on (I13).
            logger.exception("link_no=%d the sender failed", self._link_no)
            self._events.link_broken(f"{type(error).__name__}: {error}")
        self._clean_up()

    def _clean_up(self) -> None:
        with self._wake:
            self._is_closing = True
            ready, self._ready = list(self._ready), deque()
            self._ledger.close()
        for item in ready:
            item.chunk.release()
        self._transport.close()
        self._transport.free()

    def _step(self) -> bool:
        """Do one thing; False when the link closes."""
        with self._wake:
            while (work := self._next_work()) is None:
                if self._is_closing:
                    return False
                self._wake.wait()
        if self._is_closing:
            if isinstance(work, tuple) and work[0] is not None:
                work[0].chunk.release()
            return False
        if isinstance(work, _Resend):
            self._transmit(replace(work.header, seq=self._draw_seq(), num_resends=work.header.num_resends + 1), 0.0)
            return True
        ready, slot = work
        if ready is None:
            self._transmit_test(slot)
        else:
            self._gather_and_transmit(ready, slot)
        return True

    def _next_work(self) -> _Resend | tuple[_Ready | None, int] | None:
        """Return a resend, the test pattern (no chunk) or a chunk, each with its slot. Under the lock."""
        while self._ready and self._ready[0].chunk.is_void:
            self._ready.popleft().chunk.release()
        if self._resends:
            return self._resends.popleft()
        if not self._wants_test and not self._ready:
            return None
        slot = self._ledger.take()
        if slot is None:
            return None
        if self._wants_test:
            self._wants_test = False
            return None, slot
        return self._ready.popleft(), slot

    def _gather_and_transmit(self, ready: _Ready, slot: int) -> None:
        chunk = ready.chunk
        stall_s = self._clock.now() - ready.time
        try:
            checksum = chunk.gather(self._transport.buffer(slot)[: chunk.num_bytes])
        finally:
            chunk.release()
        self._transmit(
            Chunk(
                link_no=self._link_no,
                seq=self._draw_seq(),
                slot=slot,
                transfer=chunk.transfer,
                group=chunk.range.group,
                first_layer=chunk.range.first_layer,
                end_layer=chunk.range.end_layer,
                first_token=chunk.range.first_token,
                end_token=chunk.range.end_token,
                num_bytes=chunk.num_bytes,
                checksum=checksum,
                num_resends=0,
                is_void=chunk.is_void,
            ),
            stall_s,
        )

    def _transmit_test(self, slot: int) -> None:
        seq = self._draw_seq()
        self._transport.buffer(slot)[: self._test_bytes] = pattern(seq, self._test_bytes)
        self._transmit(
            Chunk(
                link_no=self._link_no,
                seq=seq,
                slot=slot,
                transfer=None,
                group=0,
                first_layer=0,
                end_layer=0,
                first_token=0,
                end_token=0,
                num_bytes=self._test_bytes,
                checksum=0,
                num_resends=0,
                is_void=False,
            ),
            0.0,
        )

    def _draw_seq(self) -> int:
        with self._wake:
            return self._ledger.next_seq()

    def _transmit(self, header: Chunk, stall_s: float) -> None:
        with self._wake:
            self._ledger.sent(header, self._clock.now())
        self._transport.send(header)
        self._events.chunk_sent(header, stall_s)
