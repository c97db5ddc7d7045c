"""The thread of a link's source end: waits for a chunk and a slot, gathers, sends. One per link.

The forward pass only announces chunks (`submit`); it never waits for a slot. A send buffer is held from gathering
until the sink's CREDIT, so a NACK is answered from it. After an abort a chunk that was begun still gets its header,
void. When the link breaks, what it has not delivered goes back to its stream, the chunks in its slots with their bytes:
the next link sends them.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.transfer_messages import Cargo, Chunk, TransferId
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.slots import SlotLedger
from pdserve.kvtransfer.transports.protocol import SendTransport

logger = logging.getLogger(__name__)

MAX_RESENDS = 2


class OutgoingChunk(Protocol):
    """A chunk that is ready to be sent. What it is copied from holds a reference until `release` (I4)."""

    transfer: TransferId
    num_bytes: int
    was_sent: bool
    """True if another link has sent it already."""

    @property
    def is_void(self) -> bool:
        """True once the transfer has ended: nobody wants the bytes."""

    def load(self, buffer: memoryview) -> Cargo:
        """Copy the bytes into a slot; return what they are, with their checksum."""

    def release(self) -> None:
        """Drop the reference to what `load` copies from. Called once, after `load` or instead of it."""


class SenderEvents(Protocol):
    """What the sender tells its owner; called on the sender's thread."""

    def chunk_sent(self, header: Chunk, stall_s: float, *, is_first: bool) -> None:
        """A chunk is on its way; it had waited `stall_s` for a slot. Not `is_first`: it was sent before."""

    def link_broken(self, reason: str) -> None:
        """The link cannot send any more, or a chunk failed its last resend."""

    def chunk_failed(self, transfer: TransferId, reason: str) -> None:
        """A chunk could not be loaded: its transfer can never be complete. The link goes on."""

    def left_over(self, chunks: list[OutgoingChunk]) -> None:
        """The thread's last act: what the link did not deliver."""


class HeldChunk:
    """What was in a slot of a link that broke: not credited. See OutgoingChunk."""

    def __init__(self, origin: OutgoingChunk, cargo: Cargo, body: bytes, *, was_sent: bool) -> None:
        self.transfer = origin.transfer
        self.num_bytes = len(body)
        self.was_sent = was_sent
        # Not the bytes that an earlier link has held.
        self._origin: OutgoingChunk = origin._origin if isinstance(origin, HeldChunk) else origin
        self._cargo = cargo
        self._body = body

    @property
    def is_void(self) -> bool:
        """See OutgoingChunk."""
        return self._origin.is_void

    def load(self, buffer: memoryview) -> Cargo:
        """See OutgoingChunk."""
        buffer[: self.num_bytes] = self._body
        return self._cargo

    def release(self) -> None:
        """See OutgoingChunk: the bytes are its own."""


@dataclass(frozen=True, slots=True)
class _Ready:
    chunk: OutgoingChunk
    time: float


@dataclass(slots=True)
class _InSlot:
    """A chunk that lies in a slot: on its way, or waiting to be sent again."""

    chunk: OutgoingChunk
    header: Chunk
    was_sent: bool
    """True once `chunk_sent` was called for it, by this link or one before."""


class ChunkSender:
    """Owns a link's slots and its thread."""

    def __init__(
        self,
        link_no: int,
        stream_no: int,
        transport: SendTransport,
        ledger: SlotLedger,
        events: SenderEvents,
        clock: Clock,
        *,
        test_bytes: int,
    ) -> None:
        self._link_no = link_no
        self._stream_no = stream_no
        self._transport = transport
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._test_bytes = test_bytes
        self._wake = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._resends: deque[_InSlot] = deque()
        self._in_flight: dict[int, _InSlot] = {}
        self._wants_test = False
        self._has_news = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"link {link_no}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, chunk: OutgoingChunk) -> bool:
        """Announce a chunk; from any thread. False on a closed link, which does not take it."""
        with self._wake:
            if self._is_closing:
                return False
            self._ready.append(_Ready(chunk, self._clock.now()))
            self._notify()
            return True

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
            self._notify()

    def credited(self, seq: int, slot: int) -> Chunk | None:
        """The sink has done with a chunk; None if the link is closing. Raises ProtocolError for one never sent."""
        with self._wake:
            if self._is_closing:
                return None
            header = self._ledger.credited(seq, slot)
            self._in_flight.pop(seq, None)
            self._notify()
            return header

    def refused(self, seq: int, slot: int) -> bool:
        """The sink could not verify a chunk: send it again, or end the link; False if it is closing.

        Raises ProtocolError for one that is not outstanding.
        """
        with self._wake:
            if self._is_closing:
                return False
            header = self._ledger.refused(seq, slot)
            held = self._in_flight.pop(seq, None)
            if held is None:
                # The test pattern, which no sink refuses.
                self._ledger.put_back(slot)
                return True
            self._resends.append(held)
            self._notify()
            if header.num_resends < MAX_RESENDS:
                return True
            self._is_closing = True
        self._events.link_broken(f"a chunk failed {1 + MAX_RESENDS} times")
        return True

    def give_back_idle(self) -> None:
        """Return borrowed slots, and their memory, if the link is idle."""
        with self._wake:
            if not self._is_closing and not self._ready and self._ledger.give_back_idle():
                self._transport.trim(self._ledger.num_slots)

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited."""
        return self._ledger.num_outstanding

    def stalled_for(self) -> float:
        """Return how long the oldest chunk has waited for its credit."""
        with self._wake:
            oldest = self._ledger.oldest_time
        return 0.0 if oldest is None else self._clock.now() - oldest

    def close(self) -> None:
        """Break the link and end the thread; returns at once. What was announced goes to `left_over`."""
        with self._wake:
            self._is_closing = True
            self._notify()
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
        self._transport.close()
        with self._wake:
            self._is_closing = True
            in_slots = [*self._in_flight.values(), *self._resends]
            ready, self._ready = list(self._ready), deque()
            self._in_flight.clear()
            self._resends.clear()
            self._ledger.close()
        chunks = [chunk for item in in_slots if (chunk := self._hold(item)) is not None]
        self._transport.free()
        self._events.left_over([*chunks, *(item.chunk for item in ready)])

    def _hold(self, item: _InSlot) -> OutgoingChunk | None:
        header = item.header
        if header.cargo is None or item.chunk.is_void:
            return None
        body = bytes(self._transport.buffer(header.slot)[: header.num_bytes])
        return HeldChunk(item.chunk, header.cargo, body, was_sent=item.was_sent)

    def _step(self) -> bool:
        """Do one thing; False when the link closes."""
        with self._wake:
            self._has_news = False
            work = self._next_work()
            if self._is_closing:
                if work is not None:
                    self._put_back(work)
                return False
        if work is not None:
            self._carry_out(work)
            return True
        pause_s = self._transport.progress()
        with self._wake:
            if not self._has_news:
                self._wake.wait(pause_s)
        return True

    def _notify(self) -> None:
        """There may be something to do. Under the lock."""
        self._has_news = True
        self._wake.notify()

    def _carry_out(self, work: "_Work") -> None:
        if isinstance(work, _InSlot):
            work.header = replace(work.header, seq=self._draw_seq(), num_resends=work.header.num_resends + 1)
            self._transmit(work, 0.0)
            return
        ready, slot = work
        if ready is None:
            self._transmit_test(slot)
        else:
            self._load_and_transmit(ready, slot)

    def _put_back(self, work: "_Work") -> None:
        """The link closes: what was taken to be sent is left over too. Under the lock."""
        if isinstance(work, _InSlot):
            self._resends.append(work)
        elif work[0] is not None:
            self._ready.appendleft(work[0])

    def _next_work(self) -> "_Work | None":
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

    def _load_and_transmit(self, ready: _Ready, slot: int) -> None:
        chunk = ready.chunk
        stall_s = self._clock.now() - ready.time
        try:
            cargo = chunk.load(self._transport.buffer(slot)[: chunk.num_bytes])
        except Exception as error:
            # A barrier: the chunk's transfer ends, the link goes on (I13).
            logger.exception("link_no=%d a chunk could not be gathered", self._link_no)
            with self._wake:
                self._ledger.put_back(slot)
            self._events.chunk_failed(chunk.transfer, f"a chunk could not be gathered: {type(error).__name__}: {error}")
            return
        finally:
            chunk.release()
        header = self._header(slot, cargo, chunk.num_bytes, is_void=chunk.is_void)
        self._transmit(_InSlot(chunk, header, chunk.was_sent), stall_s)

    def _transmit_test(self, slot: int) -> None:
        header = self._header(slot, None, self._test_bytes, is_void=False)
        self._transport.buffer(slot)[: self._test_bytes] = pattern(header.seq, self._test_bytes)
        with self._wake:
            self._ledger.sent(header, self._clock.now())
        self._transport.send(header)
        self._events.chunk_sent(header, 0.0, is_first=True)

    def _header(self, slot: int, cargo: Cargo | None, num_bytes: int, *, is_void: bool) -> Chunk:
        return Chunk(
            link_no=self._link_no,
            stream_no=self._stream_no,
            seq=self._draw_seq(),
            slot=slot,
            num_bytes=num_bytes,
            cargo=cargo,
            num_resends=0,
            is_void=is_void,
        )

    def _draw_seq(self) -> int:
        with self._wake:
            return self._ledger.next_seq()

    def _transmit(self, item: _InSlot, stall_s: float) -> None:
        with self._wake:
            self._ledger.sent(item.header, self._clock.now())
            self._in_flight[item.header.seq] = item
        self._transport.send(item.header)
        is_first, item.was_sent = not item.was_sent, True
        self._events.chunk_sent(item.header, stall_s, is_first=is_first)


_Work = _InSlot | tuple[_Ready | None, int]
