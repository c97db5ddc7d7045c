"""The two threads of a link, without sockets: what the sender sends and drops, what the landing thread reports."""

import threading
import time
from collections.abc import Callable

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.ids import Incarnation, RequestId
from pdserve.cluster.base.transfer_messages import Chunk, TransferId
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.layout import ChunkRange
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.sender import ChunkSender
from pdserve.kvtransfer.slots import SlotLedger, SlotPool

RANGE = ChunkRange(group=0, first_layer=0, end_layer=1, first_token=0, end_token=1)
WAIT_S = 5.0


def transfer_id(number: int) -> TransferId:
    return TransferId(
        request_id=RequestId("r"), attempt=0, transfer_no=number, source=Incarnation("p"), sink=Incarnation("d")
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never"
        threading.Event().wait(0.001)


class FakeTransport:
    """Slots in memory; `send` waits for the gate."""

    carries_headers = False
    address = "nowhere"

    def __init__(self) -> None:
        self.slots = [bytearray(64) for _ in range(4)]
        self.sent: list[Chunk] = []
        self.is_broken = False
        self.num_freed = 0

    async def wait_attached(self) -> None:
        pass

    def buffer(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def send(self, header: Chunk) -> None:
        if self.is_broken:
            raise BrokenPipeError("broken")
        self.sent.append(header)

    def trim(self, num_slots: int) -> None:
        pass

    def close(self) -> None:
        pass

    def free(self) -> None:
        self.num_freed += 1


class FakeChunk:
    """Eight bytes of one value."""

    def __init__(self, number: int) -> None:
        self.transfer = transfer_id(number)
        self.range = RANGE
        self.num_bytes = 8
        self.is_void = False
        self.num_released = 0
        self._number = number

    def gather(self, buffer: memoryview) -> int:
        buffer[:] = bytes([self._number] * 8)
        return self._number

    def release(self) -> None:
        self.num_released += 1


class SenderLog:
    def __init__(self) -> None:
        self.broken: list[str] = []

    def chunk_sent(self, header: Chunk, stall_s: float) -> None:
        pass

    def link_broken(self, reason: str) -> None:
        self.broken.append(reason)


def make_sender(*, most: int = 2) -> tuple[ChunkSender, FakeTransport, SlotPool, SenderLog]:
    transport, pool, log = FakeTransport(), SlotPool(4), SenderLog()
    ledger = SlotLedger(pool, base=1, most=most)
    sender = ChunkSender(7, transport, ledger, log, SystemClock(), test_bytes=16)
    sender.start()
    return sender, transport, pool, log


def test_chunks_wait_for_slots_in_order_and_are_released_when_gathered() -> None:
    sender, transport, pool, _ = make_sender()
    chunks = [FakeChunk(number) for number in range(5)]
    for chunk in chunks:
        sender.submit(chunk)
    wait_for(lambda: len(transport.sent) == 2)
    assert [chunk.num_released for chunk in chunks] == [1, 1, 0, 0, 0]
    for number in range(5):
        header = transport.sent[number]
        assert (header.checksum, transport.slots[header.slot][:8]) == (number, bytes([number] * 8))
        sender.credited(header.seq, header.slot)
        wait_for(lambda number=number: len(transport.sent) == min(5, number + 3))
        sender.validate()
    sender.give_back_idle()
    assert pool.num_lent == 1
    sender.close()
    assert sender.join(WAIT_S)
    assert (pool.num_lent, transport.num_freed) == (0, 1)
    assert [chunk.num_released for chunk in chunks] == [1] * 5


def test_a_refused_chunk_is_sent_again_from_its_slot_twice_and_then_breaks_the_link() -> None:
    sender, transport, pool, log = make_sender()
    sender.submit(FakeChunk(3))
    for number in range(3):
        wait_for(lambda number=number: len(transport.sent) == number + 1)
        header = transport.sent[number]
        assert (header.num_resends, header.slot) == (number, transport.sent[0].slot)
        sender.refused(header.seq, header.slot)
    assert sender.join(WAIT_S)
    assert log.broken == ["a chunk failed 3 times"]
    assert (len(transport.sent), pool.num_lent) == (3, 0)


def test_chunks_of_an_ended_transfer_are_released_also_while_no_slot_is_free() -> None:
    # A stalled link must not hold the blocks of what nobody wants (I4, I16).
    sender, transport, _, _ = make_sender(most=1)
    chunks = [FakeChunk(number) for number in range(4)]
    for chunk in chunks:
        sender.submit(chunk)
    wait_for(lambda: len(transport.sent) == 1)
    for chunk in chunks[1:3]:
        chunk.is_void = True
    sender.drop_void()
    assert [chunk.num_released for chunk in chunks] == [1, 1, 1, 0]
    sender.credited(transport.sent[0].seq, transport.sent[0].slot)
    wait_for(lambda: len(transport.sent) == 2)
    assert transport.sent[1].transfer == chunks[3].transfer
    sender.close()
    assert sender.join(WAIT_S)


def test_a_broken_transport_ends_its_link_and_releases_everything() -> None:
    # I13
    sender, transport, pool, log = make_sender()
    transport.is_broken = True
    chunks = [FakeChunk(number) for number in range(4)]
    for chunk in chunks:
        sender.submit(chunk)
    assert sender.join(WAIT_S)
    late = FakeChunk(9)
    sender.submit(late)
    assert [chunk.num_released for chunk in (*chunks, late)] == [1] * 5
    assert (log.broken, pool.num_lent) == (["BrokenPipeError: broken"], 0)


def test_a_sender_that_never_started_is_cleaned_up_too() -> None:
    transport, pool = FakeTransport(), SlotPool(4)
    sender = ChunkSender(7, transport, SlotLedger(pool, base=2, most=2), SenderLog(), SystemClock(), test_bytes=16)
    sender.close()
    assert sender.join(WAIT_S)
    assert (pool.num_lent, transport.num_freed) == (0, 1)


class LandingLog:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def chunk_scattered(self, header: Chunk) -> None:
        self.events.append(("scattered", header.seq))

    def chunk_dropped(self, header: Chunk) -> None:
        self.events.append(("dropped", header.seq))

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        self.events.append((reason, header.seq))

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        self.events.append(("test", is_right))

    def unbound(self, transfer: TransferId) -> None:
        self.events.append(("unbound", transfer.transfer_no))

    def link_fenced(self, link_no: int) -> None:
        self.events.append(("fenced", link_no))


class FakeTarget:
    """Takes bodies; can be told to fail."""

    def __init__(self) -> None:
        self.fails = False
        self.bodies: list[bytes] = []

    def refuse(self, chunk: ChunkRange, num_bytes: int) -> str | None:
        return None if num_bytes == 8 else "wrong size"

    def scatter(self, chunk: ChunkRange, body: memoryview) -> int:
        if self.fails:
            raise RuntimeError("no")
        self.bodies.append(bytes(body))
        return body[0]


class Bodies:
    def __init__(self, value: int | None) -> None:
        self._value = value

    def body(self, slot: int, num_bytes: int) -> memoryview:
        if self._value is None:
            raise KeyError(slot)
        return memoryview(bytes([self._value] * num_bytes))


class PatternBodies:
    def body(self, slot: int, num_bytes: int) -> memoryview:
        return memoryview(pattern(5, num_bytes))


def header(seq: int, transfer: int | None, *, link_no: int = 1, checksum: int = 3, num_bytes: int = 8) -> Chunk:
    return Chunk(
        link_no=link_no,
        seq=seq,
        slot=0,
        transfer=None if transfer is None else transfer_id(transfer),
        group=0,
        first_layer=0,
        end_layer=1,
        first_token=0,
        end_token=1,
        num_bytes=num_bytes,
        checksum=checksum,
        num_resends=0,
        is_void=False,
    )


def run_landing(act: Callable[[LandingThread], None], num_events: int) -> list[tuple[str, object]]:
    log = LandingLog()
    landing = LandingThread(log)
    landing.start()
    act(landing)
    wait_for(lambda: len(log.events) >= num_events)
    assert landing.stop(WAIT_S)
    return log.events


def test_chunks_before_bind_wait_and_after_unbind_are_dropped() -> None:
    # I1, I7
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(transfer_id(1))
        landing.landed(header(0, 1), Bodies(3))
        landing.bind(transfer_id(1), target)
        landing.landed(header(1, 1), Bodies(3))
        landing.unbind(transfer_id(1))
        landing.landed(header(2, 1), Bodies(3))
        landing.landed(header(3, 2), Bodies(3))

    events = run_landing(act, 5)
    assert events == [("scattered", 0), ("scattered", 1), ("unbound", 1), ("dropped", 2), ("dropped", 3)]
    assert target.bodies == [bytes([3] * 8)] * 2


def test_what_fails_is_refused_with_its_reason_and_the_thread_goes_on() -> None:
    # I12, I13; I9: it reports, and ends no transfer by itself: the next chunk is taken.
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(transfer_id(1))
        landing.bind(transfer_id(1), target)
        landing.landed(header(0, 1, checksum=4), Bodies(3))
        landing.landed(header(1, 1, num_bytes=9), Bodies(3))
        landing.landed(header(2, 1), Bodies(None))  # raises: a slot that is no more
        landing.bind(transfer_id(99), target)  # raises: never expected
        landing.landed(header(3, None), PatternBodies())
        landing.landed(header(5, None), PatternBodies())
        landing.landed(header(6, 1), Bodies(3))
        landing.unbind(transfer_id(1))

    events = run_landing(act, 7)
    assert events == [
        ("checksum", 0),
        ("wrong size", 1),
        ("scatter failed", 2),
        ("test", False),
        ("test", True),
        ("scattered", 6),
        ("unbound", 1),
    ]


def test_a_fenced_links_chunks_are_touched_no_more() -> None:
    # I2
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(transfer_id(1))
        landing.landed(header(0, 1, link_no=4), Bodies(3))
        landing.fence(4)
        landing.landed(header(1, 1, link_no=4), Bodies(None))
        landing.landed(header(2, None, link_no=4), Bodies(None))
        landing.bind(transfer_id(1), target)
        landing.landed(header(3, 1, link_no=5), Bodies(3))

    assert run_landing(act, 2) == [("fenced", 4), ("scattered", 3)]
