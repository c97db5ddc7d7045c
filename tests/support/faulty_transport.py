"""A transport in memory that does what bad networks and bad libraries do, and the factory that hands it out."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.transfer_messages import Chunk, LinkOffer
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk, ReceiveTransport, SendTransport
from support.virtual_time import OWNER, Network


class Fault(StrEnum):
    """What happens to a chunk on its way, or to its link."""

    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    STALL = "stall"
    DIE = "die"
    LATE_WRITE = "late write"


@dataclass
class Faults:
    """How often each fault happens; what happened is counted."""

    rng: random.Random
    shares: Mapping[Fault, float] = field(default_factory=dict)
    refused: frozenset[TransportKind] = frozenset()
    """Transports that cannot be had here."""
    counts: dict[str, int] = field(default_factory=dict)
    num_reads_after_free: int = 0

    def draw(self) -> Fault | None:
        """Return what happens to the next chunk."""
        for fault, share in self.shares.items():
            if self.rng.random() < share:
                self.counts[fault] = self.counts.get(fault, 0) + 1
                return fault
        return None

    def stop(self) -> None:
        """No more faults."""
        self.shares = {}
        self.refused = frozenset()


class FaultySender:
    """See SendTransport."""

    carries_headers = True

    def __init__(self, shared: "FaultyTransports", key: str) -> None:
        self.address = key
        self.owner = OWNER.get()
        self.receiver: FaultyReceiver | None = None
        self.is_closed = False
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._buffers: dict[int, bytearray] = {}
        self._held: tuple[Chunk, bytes] | None = None
        self._sent_until = 0.0
        self._is_stalled = False

    async def wait_attached(self, answer: str) -> None:
        """See SendTransport."""
        if self.receiver is None:
            raise BrokenPipeError("nobody attached")

    def buffer(self, slot: int) -> memoryview:
        """See SendTransport."""
        return memoryview(self._buffers.setdefault(slot, bytearray(self._shared.config.slot_bytes)))

    def send(self, header: Chunk) -> None:
        """See SendTransport."""
        if self.is_closed or self.receiver is None:
            raise BrokenPipeError("the link is closed")
        faults, network = self._shared.faults, self._shared.network
        body = bytes(self.buffer(header.slot)[: header.num_bytes])
        if self._is_stalled or not network.passes(self.owner, self.receiver.owner):
            return
        held, self._held = self._held, None
        latency_s = network.draw_latency()
        match faults.draw():
            case None:
                self._deliver(header, body, latency_s)
            case Fault.DELAY:
                self._deliver(header, body, faults.rng.uniform(0.05, 3.0))
            case Fault.DROP:
                pass
            case Fault.DUPLICATE:
                self._deliver(header, body, latency_s)
                self._deliver(header, body, faults.rng.uniform(0.0, 0.1))
            case Fault.REORDER:
                self._held = header, body
                self._loop.call_later(0.05, self._release)
            case Fault.CORRUPT:
                damaged = bytearray(body)
                damaged[faults.rng.randrange(len(damaged))] ^= 1 << faults.rng.randrange(8)
                self._deliver(header, bytes(damaged), latency_s)
            case Fault.STALL:
                self._is_stalled = True
            case Fault.DIE:
                if faults.rng.random() < 0.5:
                    raise BrokenPipeError("the transport died")
                self._loop.call_later(latency_s, self.receiver.break_off, "the transport died")
            case Fault.LATE_WRITE:
                self._deliver(header, body, latency_s)
                self._loop.call_later(faults.rng.uniform(0.0, 3.0), self.receiver.write_late, header.slot, faults.rng)
        if held is not None:
            self._deliver(*held, latency_s)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._deliver(*held, 0.0)

    def _deliver(self, header: Chunk, body: bytes, latency_s: float) -> None:
        assert self.receiver is not None
        # Strictly later than the one before: timers of equal times come in any order.
        self._sent_until = max(self._sent_until + 1e-7, self._loop.time() + latency_s)
        self._loop.call_at(self._sent_until, self.receiver.arrive, header, body)

    def progress(self) -> float | None:
        """See SendTransport."""
        return None

    def trim(self, num_slots: int) -> None:
        """See SendTransport."""

    def close(self) -> None:
        """See SendTransport."""
        if not self.is_closed and self.receiver is not None:
            network = self._shared.network
            if network.passes(self.owner, self.receiver.owner):
                self._loop.call_later(network.draw_latency(), self.receiver.break_off, "the source closed it")
        self.is_closed = True

    def free(self) -> None:
        """See SendTransport."""
        self._buffers.clear()
        self._shared.senders.pop(self.address, None)


class FaultyReceiver:
    """See ReceiveTransport."""

    answer = ""

    def __init__(
        self, shared: "FaultyTransports", key: str, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken
    ) -> None:
        self.owner = OWNER.get()
        self._shared = shared
        self._key = key
        self._slots = slots
        self._on_chunk = on_chunk
        self._on_broken = on_broken
        self._memory: dict[int, bytearray] = {}
        self._is_closed = False
        self._is_free = False

    async def attach(self) -> None:
        """See ReceiveTransport."""
        sender = self._shared.senders.get(self._key)
        if sender is None or sender.is_closed:
            raise ConnectionRefusedError("the source has no such link")
        sender.receiver = self

    def header_received(self, header: Chunk) -> None:
        """See ReceiveTransport."""
        raise ProtocolError("a chunk header on the control channel")

    def arrive(self, header: Chunk, body: bytes) -> None:
        """The network brings a chunk."""
        if self._is_closed or self._shared.network.is_gone(self.owner):
            return
        try:
            self._slots.occupy(header)
        except ProtocolError as error:
            self.break_off(str(error))
            return
        self._slot(header.slot)[: len(body)] = body
        self._on_chunk(header)

    def write_late(self, slot: int, rng: random.Random) -> None:
        """A write that nobody can stop any more: the memory is this link's for ever (I1, I7)."""
        memory = self._slot(slot)
        place = rng.randrange(64)
        memory[place : place + 16] = rng.randbytes(16)

    def break_off(self, reason: str) -> None:
        """The link is broken."""
        if not self._is_closed:
            self._on_broken(reason)

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """See ReceiveTransport."""
        # Whoever reads takes an exception for a failed copy: the schedule looks at the count.
        self._shared.faults.num_reads_after_free += self._is_free
        return memoryview(self._slot(slot))[:num_bytes].toreadonly()

    def _slot(self, slot: int) -> bytearray:
        return self._memory.setdefault(slot, bytearray(self._shared.config.slot_bytes))

    def close(self) -> None:
        """See ReceiveTransport."""
        self._is_closed = True

    async def free(self) -> None:
        """See ReceiveTransport."""
        self._is_free = True


class FaultyTransports:
    """See Transports. All workers of a test share `senders`."""

    def __init__(
        self, config: TransferConfig, faults: Faults, network: Network, senders: dict[str, FaultySender]
    ) -> None:
        self.config = config
        self.faults = faults
        self.network = network
        self.senders = senders

    async def start(self, host: str, *, is_source: bool) -> None:
        """See Transports."""

    async def stop(self) -> None:
        """See Transports."""

    def wake(self) -> None:
        """See Transports."""

    def make_sender(self, name: str, key: str) -> SendTransport:
        """See Transports."""
        if name not in list(self.config.transports) or TransportKind(name) in self.faults.refused:
            raise ProtocolError(f"transport {name!r} is not offered here")
        sender = FaultySender(self, f"{OWNER.get()}/{key}")
        self.senders[sender.address] = sender
        return sender

    def make_receiver(
        self, kind: TransportKind, offer: LinkOffer, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken
    ) -> ReceiveTransport:
        """See Transports."""
        return FaultyReceiver(self, offer.address, slots, on_chunk, on_broken)
