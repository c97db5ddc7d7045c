"""Slots and credits of a link, as its source counts them. Pure; a ledger's owner holds a lock.

A *slot* is a place for one chunk: a send buffer here, and a landing place at the sink (with shared memory they are the
same bytes). A link owns `base` slots for good; more are borrowed from the rank's `SlotPool` while there is demand and
go back when the link is idle. A slot is held from gathering until the sink's CREDIT for its sequence number (resends
come from it), so credits belong to the link, never to a transfer (invariants I2, I16).
"""

import threading
from dataclasses import dataclass

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.transfer_messages import Chunk


class NoSlotsError(ProtocolError):
    """Every slot of the rank is lent: links that are idle give back what they borrowed."""


class SlotPool:
    """Slots that all links of a rank may hold together. Links are on threads of their own, so it has its own lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_lent = 0
        self._lock = threading.Lock()

    def lend(self, count: int) -> bool:
        """Take `count` slots; False if that many are not left."""
        with self._lock:
            if self.num_lent + count > self.capacity:
                return False
            self.num_lent += count
            return True

    def give_back(self, count: int) -> None:
        """Return slots."""
        with self._lock:
            self.num_lent -= count
            assert self.num_lent >= 0, "more slots returned than lent"


@dataclass(slots=True)
class _Sent:
    header: Chunk
    time: float


class SlotLedger:
    """Free slots, and what was sent in the others."""

    def __init__(self, pool: SlotPool, *, base: int, most: int) -> None:
        """Borrow the base slots. Raises NoSlotsError if the rank has none left now: other links hold them."""
        if not pool.lend(base):
            raise NoSlotsError(f"no slots left for another link ({pool.capacity} in all)")
        self._pool = pool
        self._base = base
        self._most = most
        self._num_slots = base
        self._free = list(range(base - 1, -1, -1))
        self._sent: dict[int, _Sent] = {}
        self._held: set[int] = set()
        self._next_seq = 0

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited."""
        return len(self._sent)

    @property
    def num_slots(self) -> int:
        """Slots the link holds now."""
        return self._num_slots

    @property
    def oldest_time(self) -> float | None:
        """When the oldest outstanding chunk was sent; None if there is none."""
        return min((sent.time for sent in self._sent.values()), default=None)

    def take(self) -> int | None:
        """Return a free slot to gather into; None if there is none."""
        if not self._free and self._num_slots < self._most and self._pool.lend(1):
            self._free.append(self._num_slots)
            self._num_slots += 1
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def give_back_idle(self) -> bool:
        """Return what was borrowed if nothing is in use; True if something was."""
        if len(self._free) != self._num_slots or self._num_slots == self._base:
            return False
        self._pool.give_back(self._num_slots - self._base)
        self._num_slots = self._base
        self._free = list(range(self._base - 1, -1, -1))
        return True

    def put_back(self, slot: int) -> None:
        """Return a slot that was taken and not sent."""
        self._held.remove(slot)
        self._free.append(slot)

    def next_seq(self) -> int:
        """Draw the sequence number of the next chunk."""
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def sent(self, header: Chunk, now: float) -> None:
        """The chunk in `header.slot` is on its way."""
        self._held.discard(header.slot)
        self._sent[header.seq] = _Sent(header, now)

    def credited(self, seq: int, slot: int) -> Chunk:
        """The sink has done with a chunk: its slot is free. Raises ProtocolError for a credit never earned."""
        header = self._take_sent(seq, slot)
        self._free.append(slot)
        return header

    def refused(self, seq: int, slot: int) -> Chunk:
        """The sink could not verify a chunk; its slot stays held for a resend (`sent` again, or `put_back`)."""
        header = self._take_sent(seq, slot)
        self._held.add(slot)
        return header

    def close(self) -> None:
        """The link is fenced: give every slot back to the rank."""
        self._sent.clear()
        self._held.clear()
        self._free.clear()
        self._pool.give_back(self._num_slots)
        self._num_slots = 0

    def validate(self) -> None:
        """Check that every slot is free, held for gathering, or outstanding, exactly once."""
        sent = [item.header.slot for item in self._sent.values()]
        everything = sorted([*self._free, *self._held, *sent])
        assert everything == list(range(self._num_slots)), f"slots do not add up: {everything} of {self._num_slots}"

    def _take_sent(self, seq: int, slot: int) -> Chunk:
        sent = self._sent.get(seq)
        if sent is None or sent.header.slot != slot:
            raise ProtocolError(f"a credit for chunk {seq} in slot {slot}, which is not outstanding")
        del self._sent[seq]
        return sent.header


class LandingSlots:
    """The sink's view of a link's slots: which hold a chunk that was not credited yet (I2), and how large they are."""

    def __init__(self, *, link_no: int, stream_no: int, source: Incarnation, num_slots: int, slot_bytes: int) -> None:
        self._link_no = link_no
        self._stream_no = stream_no
        self._source = source
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._occupied: set[int] = set()
        self._next_seq = 0

    def __len__(self) -> int:
        """Slots that hold a chunk."""
        return len(self._occupied)

    def occupy(self, header: Chunk) -> None:
        """A chunk lands.

        Raises ProtocolError if it does not fit, its slot still holds another, or one before it is missing (I2, I17):
        what a link lost, repeated or reordered is found with the next header. So is what belongs to a transfer of
        another source (I3).
        """
        if header.cargo is not None and header.cargo.transfer.source != self._source:
            raise ProtocolError(f"link {self._link_no} brings a chunk of a transfer from another source")
        if (header.link_no, header.stream_no) != (self._link_no, self._stream_no):
            raise ProtocolError(f"link {self._link_no} brings a chunk of {header.link_no}, stream {header.stream_no}")
        if header.seq != self._next_seq:
            raise ProtocolError(f"chunk {header.seq} comes where {self._next_seq} was expected")
        if not (0 <= header.slot < self.num_slots and 0 < header.num_bytes <= self.slot_bytes):
            raise ProtocolError(f"chunk {header.seq} does not fit: slot {header.slot}, {header.num_bytes} bytes")
        if header.slot in self._occupied:
            raise ProtocolError(f"chunk {header.seq} lands in slot {header.slot}, which was not credited")
        self._occupied.add(header.slot)
        self._next_seq += 1

    def vacate(self, slot: int) -> None:
        """The chunk was credited or refused: the slot is the source's again."""
        self._occupied.discard(slot)
