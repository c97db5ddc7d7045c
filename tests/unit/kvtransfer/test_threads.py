"""The two threads of a link, without sockets: what the sender sends and drops, what the landing thread reports."""

import threading
import time
from collections.abc import Callable

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.kv_layout import ChunkRange, GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.transfer_messages import Cargo, Chunk, TransferId
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.sender import ChunkSender, OutgoingChunk
from pdserve.kvtransfer.slots import SlotLedger, SlotPool
from support.chunks import RANGE, make_header, make_transfer_id, whole_stream

WAIT_S = 5.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "never"
        threading.Event().wait(0.001)


class FakeTransport:
    """Slots in memory; `send` fails once it is broken."""

    carries_headers = False
    address = "nowhere"

    def __init__(self) -> None:
        self.slots = [bytearray(64) for _ in range(4)]
        self.sent: list[Chunk] = []
        self.is_broken = False
        self.num_freed = 0

    async def wait_attached(self, answer: str) -> None:
        pass

    def buffer(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def send(self, header: Chunk) -> None:
        if self.is_broken:
            raise BrokenPipeError("broken")
        self.sent.append(header)

    def progress(self) -> float | None:
        return None

    def trim(self, num_slots: int) -> None:
        pass

    def close(self) -> None:
        pass

    def free(self) -> None:
        self.num_freed += 1


class FakeChunk:
    """Eight bytes of one value."""

    def __init__(self, number: int) -> None:
        self.num_bytes = 8
        self.transfer = make_transfer_id(number)
        self.is_void = False
        self.was_sent = False
        self.fails = False
        self.num_released = 0
        self._number = number

    def load(self, buffer: memoryview) -> Cargo:
        if self.fails:
            raise MemoryError("no")
        buffer[:] = bytes([self._number] * 8)
        return Cargo(transfer=make_transfer_id(self._number), chunk_no=0, range=RANGE, checksum=self._number)

    def release(self) -> None:
        self.num_released += 1


class SenderLog:
    def __init__(self) -> None:
        self.broken: list[str] = []
        self.firsts: list[bool] = []
        self.failed: list[tuple[int, str]] = []
        self.left: list[OutgoingChunk] = []

    def chunk_sent(self, header: Chunk, stall_s: float, *, is_first: bool) -> None:
        self.firsts.append(is_first)

    def chunk_failed(self, transfer: TransferId, reason: str) -> None:
        self.failed.append((transfer.transfer_no, reason))

    def left_over(self, chunks: list[OutgoingChunk]) -> None:
        self.left += chunks

    def link_broken(self, reason: str) -> None:
        self.broken.append(reason)


def make_sender(*, most: int = 2) -> tuple[ChunkSender, FakeTransport, SlotPool, SenderLog]:
    transport, pool, log = FakeTransport(), SlotPool(4), SenderLog()
    ledger = SlotLedger(pool, base=1, most=most)
    sender = ChunkSender(7, 0, transport, ledger, log, SystemClock(), test_bytes=16)
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
        assert (header.cargo and header.cargo.checksum, transport.slots[header.slot][:8]) == (
            number,
            bytes([number] * 8),
        )
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
    assert transport.sent[1].cargo == chunks[3].load(memoryview(bytearray(8)))
    sender.close()
    assert sender.join(WAIT_S)


def test_a_broken_transport_ends_its_link_and_gives_back_what_it_did_not_deliver() -> None:
    # I13
    sender, transport, pool, log = make_sender()
    transport.is_broken = True
    chunks = [FakeChunk(number) for number in range(4)]
    for chunk in chunks:
        sender.submit(chunk)
    assert sender.join(WAIT_S)
    assert not sender.submit(FakeChunk(9))
    assert (log.broken, pool.num_lent) == (["BrokenPipeError: broken"], 0)
    # The first one was gathered; the others never were.
    assert [chunk.num_released for chunk in chunks] == [1, 0, 0, 0]
    assert log.left[1:] == chunks[1:]
    assert not log.left[0].was_sent
    assert loaded(log.left[0]) == loaded(chunks[0])


def loaded(chunk: OutgoingChunk) -> tuple[bytes, Cargo]:
    buffer = bytearray(8)
    cargo = chunk.load(memoryview(buffer))
    return bytes(buffer), cargo


def test_what_was_sent_and_not_credited_is_left_over_with_its_bytes() -> None:
    sender, transport, _, log = make_sender()
    chunks = [FakeChunk(number) for number in range(4)]
    for chunk in chunks:
        sender.submit(chunk)
    wait_for(lambda: len(transport.sent) == 2)
    sender.credited(transport.sent[0].seq, transport.sent[0].slot)
    wait_for(lambda: len(transport.sent) == 3)
    sender.refused(transport.sent[1].seq, transport.sent[1].slot)
    wait_for(lambda: len(transport.sent) == 4)
    chunks[2].is_void = True
    sender.close()
    assert sender.join(WAIT_S)
    held = [chunk for chunk in log.left if chunk.was_sent]
    assert [loaded(chunk) for chunk in held] == [loaded(chunks[1])]
    assert [chunk for chunk in log.left if not chunk.was_sent] == [chunks[3]]
    assert log.firsts == [True, True, True, False]


def make_stream() -> ChunkStream:
    layout = KVLayout(
        model_digest="m",
        kv_dtype=KVDtype.FLOAT32,
        block_size=16,
        num_kv_heads=1,
        head_dim=4,
        groups=(GroupLayout(window=0, layers=(0,)),),
    )
    return ChunkStream(0, whole_stream(layout), [])


class StreamLog(SenderLog):
    """Gives what a link leaves over back to its stream."""

    def __init__(self, stream: ChunkStream) -> None:
        super().__init__()
        self.sender: ChunkSender | None = None
        self._stream = stream

    def left_over(self, chunks: list[OutgoingChunk]) -> None:
        assert self.sender is not None
        self._stream.take_back(self.sender, chunks)


def open_link(stream: ChunkStream) -> tuple[ChunkSender, FakeTransport]:
    transport, log = FakeTransport(), StreamLog(stream)
    sender = ChunkSender(7, 0, transport, SlotLedger(SlotPool(4), base=2, most=2), log, SystemClock(), test_bytes=16)
    log.sender = sender
    sender.start()
    stream.carry_by(sender)
    return sender, transport


def test_a_stream_goes_on_over_the_next_link_from_what_the_last_one_held() -> None:
    stream = make_stream()
    chunks = [FakeChunk(number) for number in range(6)]
    stream.submit(chunks[0])
    assert stream.num_waiting == 1
    first, transport = open_link(stream)
    for chunk in chunks[1:5]:
        stream.submit(chunk)
    wait_for(lambda: len(transport.sent) == 2)
    first.credited(transport.sent[0].seq, transport.sent[0].slot)
    wait_for(lambda: len(transport.sent) == 3)
    first.close()
    assert first.join(WAIT_S)
    stream.submit(chunks[5])
    assert stream.num_waiting == 5  # two from slots, three that were never gathered
    second, transport = open_link(stream)
    for number in range(5):
        wait_for(lambda number=number: len(transport.sent) > number)
        header = transport.sent[number]
        second.credited(header.seq, header.slot)
    sent = {header.cargo.transfer.transfer_no for header in transport.sent if header.cargo is not None}
    assert sent == {1, 2, 3, 4, 5}
    assert [chunk.num_released for chunk in chunks] == [1] * 6
    second.close()
    assert second.join(WAIT_S)
    assert stream.num_waiting == 0


def test_a_stream_that_is_over_releases_what_waits_and_what_still_comes() -> None:
    # I16
    stream = make_stream()
    chunks = [FakeChunk(number) for number in range(5)]
    link, transport = open_link(stream)
    for chunk in chunks[:3]:
        stream.submit(chunk)
    wait_for(lambda: len(transport.sent) == 2)
    stream.close()
    link.close()
    assert link.join(WAIT_S)
    stream.submit(chunks[3])
    assert [chunk.num_released for chunk in chunks[:4]] == [1] * 4
    assert stream.num_waiting == 0
    other = make_stream()
    other.submit(chunks[4])
    chunks[4].is_void = True
    other.drop_void()
    assert (chunks[4].num_released, other.num_waiting) == (1, 0)
    # What a link leaves over after that is released as well.
    other.submit(chunks[4])
    assert (chunks[4].num_released, other.num_waiting) == (2, 0)


def test_a_sender_that_never_started_is_cleaned_up_too() -> None:
    transport, pool = FakeTransport(), SlotPool(4)
    sender = ChunkSender(7, 0, transport, SlotLedger(pool, base=2, most=2), SenderLog(), SystemClock(), test_bytes=16)
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

    def refuse(self, stream_no: int, chunk: ChunkRange, num_bytes: int) -> str | None:
        return None if num_bytes == 8 else "wrong size"

    def scatter(self, stream_no: int, chunk: ChunkRange, body: memoryview) -> int:
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


def run_landing(act: Callable[[LandingThread], None], num_events: int) -> list[tuple[str, object]]:
    log = LandingLog()
    landing = LandingThread(log, Incarnation("d"))
    landing.start()
    act(landing)
    wait_for(lambda: len(log.events) >= num_events)
    assert landing.stop(WAIT_S)
    return log.events


def test_chunks_before_bind_wait_and_after_unbind_are_dropped() -> None:
    # I1, I7
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(make_transfer_id(1))
        landing.landed(make_header(0, transfer=1), Bodies(3))
        landing.bind(make_transfer_id(1), target)
        landing.landed(make_header(1, transfer=1, chunk_no=1), Bodies(3))
        landing.unbind(make_transfer_id(1))
        landing.landed(make_header(2, transfer=1, chunk_no=2), Bodies(3))

    events = run_landing(act, 4)
    assert events == [("scattered", 0), ("scattered", 1), ("unbound", 1), ("dropped", 2)]
    assert target.bodies == [bytes([3] * 8)] * 2


def test_a_transfer_counts_from_its_announcement_on() -> None:
    # Not from when the thread gets to it: who is woken to look for its chunks looks right now, and parks else.
    log = LandingLog()
    landing = LandingThread(log, Incarnation("d"))
    landing.expect(make_transfer_id(1))
    assert landing.num_transfers == 1
    landing.start()
    landing.unbind(make_transfer_id(1))
    wait_for(lambda: log.events == [("unbound", 1)])
    assert landing.num_transfers == 0
    assert landing.stop(WAIT_S)


def test_chunks_that_come_before_their_transfer_is_announced_wait_for_it() -> None:
    # Rank 0, which announces it, is another process than the rank whose thread this is.
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        for transfer in (2, 3, 4, 5):
            landing.landed(make_header(transfer, link_no=transfer, transfer=transfer), Bodies(3))
        # Numbers count up, so 2 will never be announced; the link of 5 breaks.
        landing.expect(make_transfer_id(3))
        landing.bind(make_transfer_id(3), target)
        landing.fence(5)
        landing.expect(make_transfer_id(4))
        landing.unbind(make_transfer_id(4))
        landing.expect(make_transfer_id(5))
        landing.bind(make_transfer_id(5), target)
        landing.landed(make_header(9, transfer=None), PatternBodies())

    assert run_landing(act, 6) == [
        ("dropped", 2),
        ("scattered", 3),
        ("fenced", 5),
        ("dropped", 4),
        ("unbound", 4),
        ("test", False),
    ]
    stranger = LandingLog()
    landing = LandingThread(stranger, Incarnation("another life"))
    landing.start()
    landing.landed(make_header(1, transfer=1), Bodies(3))
    wait_for(lambda: bool(stranger.events))
    assert landing.stop(WAIT_S)
    assert stranger.events == [("dropped", 1)]


def test_what_fails_is_refused_with_its_reason_and_the_thread_goes_on() -> None:
    # I12, I13; I9: it reports, and ends no transfer by itself: the next chunk is taken.
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(make_transfer_id(1))
        landing.bind(make_transfer_id(1), target)
        landing.landed(make_header(0, transfer=1, checksum=4), Bodies(3))
        landing.landed(make_header(1, transfer=1, num_bytes=9), Bodies(3))
        landing.landed(make_header(2, transfer=1), Bodies(None))  # raises: a slot that is no more
        landing.bind(make_transfer_id(99), target)  # raises: never expected
        landing.landed(make_header(3, transfer=None), PatternBodies())
        landing.landed(make_header(5, transfer=None), PatternBodies())
        landing.landed(make_header(6, transfer=1), Bodies(3))
        landing.unbind(make_transfer_id(1))

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
        landing.expect(make_transfer_id(1))
        landing.landed(make_header(0, transfer=1, link_no=4), Bodies(3))
        landing.fence(4)
        landing.landed(make_header(1, transfer=1, link_no=4), Bodies(None))
        landing.landed(make_header(2, transfer=None, link_no=4), Bodies(None))
        landing.bind(make_transfer_id(1), target)
        landing.landed(make_header(3, transfer=1, link_no=5), Bodies(3))

    assert run_landing(act, 2) == [("fenced", 4), ("scattered", 3)]


def test_a_chunk_that_comes_again_is_dropped_whatever_it_holds() -> None:
    # I1, I12: after a fail-over, when its request may decode already.
    target = FakeTarget()

    def act(landing: LandingThread) -> None:
        landing.expect(make_transfer_id(1))
        landing.landed(make_header(0, transfer=1, chunk_no=7), Bodies(3))
        landing.landed(make_header(0, transfer=1, chunk_no=7, link_no=2), Bodies(3))
        landing.bind(make_transfer_id(1), target)
        landing.landed(make_header(1, transfer=1, chunk_no=7, link_no=2), Bodies(9))
        landing.landed(make_header(2, transfer=1, chunk_no=8, link_no=2, checksum=4), Bodies(3))
        landing.landed(make_header(3, transfer=1, chunk_no=8, link_no=2), Bodies(3))

    events = run_landing(act, 5)
    assert events == [("scattered", 0), ("dropped", 0), ("dropped", 1), ("checksum", 2), ("scattered", 3)]
    assert target.bodies == [bytes([3] * 8)] * 3


def test_a_chunk_that_cannot_be_gathered_ends_its_transfer_and_not_the_link() -> None:
    # I5, I13
    sender, transport, _, log = make_sender()
    chunks = [FakeChunk(number) for number in range(3)]
    chunks[1].fails = True
    for chunk in chunks:
        sender.submit(chunk)
    wait_for(lambda: len(transport.sent) == 2)
    assert log.failed == [(1, "a chunk could not be gathered: MemoryError: no")]
    assert [chunk.num_released for chunk in chunks] == [1, 1, 1]
    sender.validate()
    assert log.broken == []
    sender.close()
    assert sender.join(WAIT_S)


def test_a_credit_that_comes_while_the_link_closes_is_none() -> None:
    sender, transport, _, _ = make_sender()
    sender.submit(FakeChunk(1))
    wait_for(lambda: len(transport.sent) == 1)
    header = transport.sent[0]
    sender.close()
    assert sender.join(WAIT_S)
    assert sender.credited(header.seq, header.slot) is None
    assert not sender.refused(header.seq, header.slot)
