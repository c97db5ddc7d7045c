"""The thread of a rank's sink end: verifies landed chunks and scatters them into bound blocks. One per rank.

Everything about bindings happens on this one thread, in the order in which it was asked for: so a chunk that comes
before BIND waits, also one that comes before this rank was told of its transfer, and UNBIND is answered when no copy
into those blocks is in hand. The thread decides nothing about a transfer (I9); it reports what it found. Remote bytes
reach blocks nowhere else (I1).
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.kv_layout import ChunkRange
from pdserve.cluster.base.transfer_messages import Chunk, TransferId
from pdserve.kvtransfer.pattern import pattern

logger = logging.getLogger(__name__)

CHECKSUM = "checksum"
SCATTER_FAILED = "scatter failed"
"""Reasons of a refusal after which the chunk's tokens hold nothing that can be trusted."""


class ScatterTarget(Protocol):
    """Where a transfer's chunks go."""

    def refuse(self, stream_no: int, chunk: ChunkRange, num_bytes: int) -> str | None:
        """Return why a chunk cannot belong to the transfer (range, size); None if it can."""

    def scatter(self, stream_no: int, chunk: ChunkRange, body: memoryview) -> int:
        """Copy the body into the blocks; return its checksum."""


class LandedBodies(Protocol):
    """Where a link's landed bytes are."""

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """Return the bytes of a slot."""


class LandingEvents(Protocol):
    """What the landing thread tells its owner; called on its thread."""

    def chunk_scattered(self, header: Chunk) -> None:
        """The chunk is in its blocks and verified: credit it, count it."""

    def chunk_dropped(self, header: Chunk) -> None:
        """Nobody wants the chunk, or it is void: credit it."""

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        """The chunk failed its checksum, could not be scattered, or does not belong: NACK it, or credit it."""

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        """The link's test pattern came through, or did not."""

    def unbound(self, transfer: TransferId) -> None:
        """Nothing writes the transfer's blocks any more."""

    def link_fenced(self, link_no: int) -> None:
        """Nothing reads the link's slots any more."""


@dataclass(frozen=True, slots=True)
class _Expect:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class _Bind:
    transfer: TransferId
    target: ScatterTarget


@dataclass(frozen=True, slots=True)
class _Unbind:
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class _Landed:
    header: Chunk
    bodies: LandedBodies

    @property
    def transfer(self) -> TransferId:
        """Whose chunk it is."""
        assert self.header.cargo is not None, "test patterns do not wait"
        return self.header.cargo.transfer


@dataclass(frozen=True, slots=True)
class _Fence:
    link_no: int


@dataclass(frozen=True, slots=True)
class _Forget:
    link_no: int


@dataclass(slots=True)
class _Binding:
    target: ScatterTarget | None = None
    waiting: list[_Landed] = field(default_factory=list)
    verified: set[tuple[int, int]] = field(default_factory=set)
    """Stream and number of each chunk that is in its blocks. After a fail-over it may come again, when its request
    decodes already, or its blocks are another's."""


_Command = _Expect | _Bind | _Unbind | _Landed | _Fence | _Forget


class LandingThread:
    """Runs commands in order."""

    def __init__(self, events: LandingEvents, incarnation: Incarnation) -> None:
        """`incarnation` is the sink's."""
        self._events = events
        self._incarnation = incarnation
        self._bindings: dict[TransferId, _Binding] = {}
        self._transfers: set[TransferId] = set()
        self._early: list[_Landed] = []
        self._last_transfer_no = 0
        self._fenced: set[int] = set()
        self._commands: deque[_Command | None] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="landing", daemon=True)

    @property
    def num_transfers(self) -> int:
        """Transfers between `expect` and the answer to `unbind`."""
        return len(self._transfers)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what was asked for; True if it did in time."""
        self._put(None)
        if self._thread.ident is None:
            return True  # it was never started
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def expect(self, transfer: TransferId) -> None:
        """Chunks of this transfer may come; they wait for `bind`."""
        # At once, not when the thread gets to it: a poller that is woken now would park again.
        self._transfers.add(transfer)
        self._put(_Expect(transfer))

    def bind(self, transfer: TransferId, target: ScatterTarget) -> None:
        """Scatter the transfer's chunks into `target`, those that wait first."""
        self._put(_Bind(transfer, target))

    def unbind(self, transfer: TransferId) -> None:
        """Drop the transfer's chunks from now on; answered by `unbound`. May be repeated."""
        self._put(_Unbind(transfer))

    def landed(self, header: Chunk, bodies: LandedBodies) -> None:
        """A chunk has landed in its slot."""
        self._put(_Landed(header, bodies))

    def fence(self, link_no: int) -> None:
        """The link is over: answered by `link_fenced` when no body of it is in use."""
        self._put(_Fence(link_no))

    def forget(self, link_no: int) -> None:
        """No chunk of a fenced link can come any more."""
        self._put(_Forget(link_no))

    def _put(self, command: _Command | None) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._commands:
                    self._wake.wait()
                command = self._commands.popleft()
            if command is None:
                return
            self._carry_out(command)

    def _carry_out(self, command: _Command) -> None:
        try:
            self._execute(command)
        except Exception:
            # The barrier of this thread: one bad command must not stop all others (I13).
            logger.exception("the landing thread could not carry out %s", type(command).__name__)

    def _execute(self, command: _Command) -> None:
        match command:
            case _Expect(transfer):
                self._expect(transfer)
            case _Bind(transfer, target):
                binding = self._bindings[transfer]
                binding.target = target
                waiting, binding.waiting = binding.waiting, []
                for landed in waiting:
                    self._scatter(landed, binding, target)
            case _Unbind(transfer):
                unbound = self._bindings.pop(transfer, None)
                for landed in unbound.waiting if unbound is not None else ():
                    self._events.chunk_dropped(landed.header)
                self._transfers.discard(transfer)
                self._events.unbound(transfer)
            case _Landed(header) if header.link_no in self._fenced:
                logger.debug("link_no=%d a chunk of a fenced link is dropped", header.link_no)
            case _Landed():
                self._land(command)
            case _Fence(link_no):
                self._fenced.add(link_no)
                for binding in self._bindings.values():
                    binding.waiting = [landed for landed in binding.waiting if landed.header.link_no != link_no]
                self._early = [landed for landed in self._early if landed.header.link_no != link_no]
                self._events.link_fenced(link_no)
            case _Forget(link_no):
                self._fenced.discard(link_no)

    def _expect(self, transfer: TransferId) -> None:
        """Numbers count up, and transfers are expected in order: what comes early is of a larger number."""
        self._last_transfer_no = transfer.transfer_no
        binding = self._bindings[transfer] = _Binding()
        early, self._early = self._early, []
        for landed in early:
            if landed.transfer == transfer:
                binding.waiting.append(landed)
            elif landed.transfer.transfer_no > transfer.transfer_no:
                self._early.append(landed)
            else:
                self._events.chunk_dropped(landed.header)

    def _is_early(self, transfer: TransferId) -> bool:
        """True if a transfer may be one of which this rank has not been told yet: its rank 0 is another process."""
        return transfer.sink == self._incarnation and transfer.transfer_no > self._last_transfer_no

    def _land(self, landed: _Landed) -> None:
        header = landed.header
        if header.cargo is None:
            body = landed.bodies.body(header.slot, header.num_bytes)
            self._events.test_verified(header, body == pattern(header.seq, header.num_bytes))
            return
        binding = self._bindings.get(header.cargo.transfer)
        if binding is None and not header.is_void and self._is_early(header.cargo.transfer):
            self._early.append(landed)
        elif binding is None or header.is_void:
            self._events.chunk_dropped(header)
        elif binding.target is None:
            binding.waiting.append(landed)
        else:
            self._scatter(landed, binding, binding.target)

    def _scatter(self, landed: _Landed, binding: _Binding, target: ScatterTarget) -> None:
        header, cargo = landed.header, landed.header.cargo
        assert cargo is not None, "test patterns have no target"
        key = header.stream_no, cargo.chunk_no
        if key in binding.verified:
            self._events.chunk_dropped(header)
            return
        try:
            reason = target.refuse(header.stream_no, cargo.range, header.num_bytes)
            if reason is None:
                body = landed.bodies.body(header.slot, header.num_bytes)
                checksum = target.scatter(header.stream_no, cargo.range, body)
                reason = None if checksum == cargo.checksum else CHECKSUM
        except Exception:
            # The barrier of this thread: the chunk is refused, its transfer decides (I13).
            logger.exception("scatter failed")
            reason = SCATTER_FAILED
        if reason is None:
            binding.verified.add(key)
            self._events.chunk_scattered(header)
        else:
            self._events.chunk_refused(header, reason)
