"""Transports by themselves: what they refuse to attach to, and what they carry."""

import asyncio
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports import torch_dist
from pdserve.kvtransfer.transports.nixl import NixlAgent, NixlReceiver, NixlSender
from pdserve.kvtransfer.transports.shm import ShmReceiver, ShmSender
from pdserve.kvtransfer.transports.torch_dist import TorchDistReceiver, TorchDistSender
from pdserve.kvtransfer.transports.torch_store import TorchStore
from support.chunks import make_header


def make_slots() -> LandingSlots:
    return LandingSlots(link_no=7, stream_no=0, source=Incarnation("p"), num_slots=2, slot_bytes=5000)


def header_of(slot: int, *, seq: int = 0) -> Chunk:
    return make_header(seq, slot, link_no=7, num_bytes=5000)


def attach(address: str) -> ShmReceiver:
    receiver = ShmReceiver(address, make_slots(), lambda header: None)
    asyncio.run(receiver.attach())
    return receiver


def test_shared_memory_carries_bytes_and_leaves_nothing() -> None:
    before = os.listdir("/proc/self/fd")
    sender = ShmSender(slot_bytes=5000, num_slots=2)
    receiver = attach(sender.address)
    for slot in (0, 1):
        sender.buffer(slot)[:5000] = pattern(slot, 5000)
        assert receiver.body(slot, 5000) == pattern(slot, 5000)
    with pytest.raises(TypeError, match="read-only"):
        receiver.body(0, 10)[0] = 1
    sender.trim(1)
    assert bytes(receiver.body(1, 100)) == bytes(100)
    assert receiver.body(0, 5000) == pattern(0, 5000)
    sender.close()
    sender.free()
    asyncio.run(receiver.free())
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    "change",
    [
        lambda pid, fd, size, nonce: f"{pid}:{fd}:{size}:{'0' * 64}",  # another file of the right size
        lambda pid, fd, size, nonce: f"{pid}:{fd}:{int(size) * 2}:{nonce}",
        lambda pid, fd, size, nonce: f"{pid}:{fd}:{nonce}",
        lambda pid, fd, size, nonce: "nonsense",
        lambda pid, fd, size, nonce: f"{pid}/../1:{fd}:{size}:{nonce}",
    ],
)
def test_another_file_or_a_malformed_address_is_not_mapped(change: Callable[[str, str, str, str], str]) -> None:
    # I17
    sender = ShmSender(slot_bytes=5000, num_slots=2)
    with pytest.raises(ProtocolError):
        attach(change(*sender.address.split(":")))
    sender.close()
    sender.free()


def test_a_process_that_is_gone_cannot_be_attached_to() -> None:
    sender = ShmSender(slot_bytes=5000, num_slots=2)
    _, fd, size, nonce = sender.address.split(":")
    with pytest.raises(OSError, match="No such file"):
        attach(f"{2**22 + 1}:{fd}:{size}:{nonce}")
    sender.close()
    with pytest.raises((OSError, ProtocolError)):
        attach(sender.address)
    sender.free()


def test_what_is_no_sealed_memory_file_is_not_mapped(tmp_path: Path) -> None:
    # I17: a file that shrinks would kill its readers, one that blocks would hold the loop.
    size = mmap.PAGESIZE * 5
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(size))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, size)
    files = [os.open(pipe, os.O_RDWR), os.open(plain, os.O_RDONLY), loose]
    for file in files:
        with pytest.raises(ProtocolError, match="another one"):
            attach(f"{os.getpid()}:{file}:{size}:{'00' * 32}")
        os.close(file)


def test_the_pattern_tells_sequence_numbers_and_places_apart() -> None:
    assert len(pattern(3, 5000)) == 5000
    assert pattern(3, 5000) != pattern(4, 5000)
    assert pattern(3, 5000)[:1000] != pattern(3, 5000)[1000:2000]


class NixlPair:
    """Both ends of a NIXL link, on agents of their own."""

    def __init__(self) -> None:
        self.source, self.sink = NixlAgent(), NixlAgent()
        self.slots = make_slots()
        self.landed: queue.Queue[Chunk] = queue.Queue()
        self.broken: queue.Queue[str] = queue.Queue()
        self.sender = NixlSender(self.source, slot_bytes=5000, num_slots=2)
        self.receiver = NixlReceiver(self.sink, self.slots, self.landed.put, self.broken.put)
        asyncio.run(self.receiver.attach())
        asyncio.run(self.sender.wait_attached(self.receiver.answer))

    def send(self, header: Chunk) -> None:
        """Send, and see it through."""
        self.sender.send(header)
        while (pause_s := self.sender.progress()) is not None:
            time.sleep(pause_s)

    def close(self) -> None:
        """Close both ends and their agents."""
        self.sender.close()
        self.sender.free()
        self.receiver.close()
        asyncio.run(self.receiver.free())
        self.source.close()
        self.sink.close()


@pytest.fixture
def nixl() -> Iterator[NixlPair]:
    pair = NixlPair()
    yield pair
    pair.close()


def test_nixl_carries_bytes_and_announces_each_write(nixl: NixlPair) -> None:
    for round_no in range(3):
        for slot in (0, 1):
            nixl.sender.buffer(slot)[:5000] = pattern(round_no * 2 + slot, 5000)
            nixl.send(header_of(slot, seq=round_no * 2 + slot))
        for slot in (0, 1):
            header = nixl.landed.get(timeout=5)
            assert (header.slot, header.seq) == (slot, round_no * 2 + slot)
            assert nixl.receiver.body(slot, 5000) == pattern(header.seq, 5000)
            nixl.slots.vacate(slot)
    assert nixl.broken.empty()


def test_a_nixl_write_into_an_occupied_slot_breaks_the_link(nixl: NixlPair) -> None:
    # I2
    nixl.send(header_of(0))
    nixl.landed.get(timeout=5)
    nixl.send(header_of(0, seq=1))
    assert "not credited" in nixl.broken.get(timeout=5)
    assert nixl.landed.empty()


def test_nothing_is_written_into_a_fenced_landing_region() -> None:
    # I1, I7: the source has not heard of the end; the addresses stay taken, and nobody can store there.
    nixl = NixlPair()
    nixl.receiver.close()
    asyncio.run(nixl.receiver.free())
    with pytest.raises(BrokenPipeError):
        nixl.send(header_of(1))
    assert nixl.landed.empty()
    nixl.sender.close()
    nixl.sender.free()
    nixl.source.close()
    nixl.sink.close()


@pytest.mark.parametrize(
    "answer", ["", "nonsense", "00:1:2:zz", f"{'00' * 16}:-5:8192:00", f"{'00' * 15}:4096:8192:00"]
)
def test_a_malformed_nixl_answer_is_refused(answer: str) -> None:
    agent = NixlAgent()
    sender = NixlSender(agent, slot_bytes=5000, num_slots=2)
    with pytest.raises(ProtocolError, match="malformed"):
        asyncio.run(sender.wait_attached(answer))
    sender.close()
    sender.free()
    agent.close()


def test_a_backend_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    agent = NixlAgent("NOPE")
    with pytest.raises(OSError, match=r"NIXL has no backend NOPE here; it has .*UCX"):
        agent.get()
    agent.close()


def test_a_poller_that_fails_breaks_its_links_and_another_one_starts(nixl: NixlPair) -> None:
    # I13
    def explode(header: Chunk) -> None:
        raise RuntimeError("no")

    nixl.receiver._on_chunk = explode
    nixl.send(header_of(0))
    assert "the NIXL poller failed: RuntimeError" in nixl.broken.get(timeout=5)
    again: queue.Queue[bytes] = queue.Queue()
    nixl.sink.expect(nixl.receiver._key, again.put, nixl.broken.put)
    nixl.send(header_of(1, seq=1))
    assert again.get(timeout=5)


class TorchPair:
    """Both ends of a torch_dist link."""

    def __init__(self) -> None:
        self.store = TorchStore()
        self.landed: queue.Queue[Chunk] = queue.Queue()
        self.broken: queue.Queue[str] = queue.Queue()
        self.sender = TorchDistSender(self.store, "127.0.0.1", slot_bytes=5000)
        self.receiver = TorchDistReceiver(
            self.sender.address, make_slots(), self.landed.put, self.broken.put, stall_s=1.0
        )

    async def meet(self) -> None:
        """Both ends find each other."""
        await self.receiver.attach()
        await self.sender.wait_attached(self.receiver.answer)

    def send(self, header: Chunk) -> None:
        """Post a send, and let its header go over the control channel."""
        self.sender.send(header)
        self.receiver.header_received(header)

    async def close(self) -> None:
        """Close both ends and the store."""
        self.sender.close()
        self.sender.free()
        self.receiver.close()
        await self.receiver.free()
        self.store.close()


@pytest.fixture
def torch_pair() -> Iterator[TorchPair]:
    pair = TorchPair()
    asyncio.run(pair.meet())
    yield pair
    asyncio.run(pair.close())


def test_torch_dist_carries_bytes_in_the_order_of_the_headers(torch_pair: TorchPair) -> None:
    for seq in range(6):
        slot = seq % 2
        torch_pair.sender.buffer(slot)[:5000] = pattern(seq, 5000)
        torch_pair.send(header_of(slot, seq=seq))
        header = torch_pair.landed.get(timeout=5)
        assert (header.slot, header.seq) == (slot, seq)
        assert torch_pair.receiver.body(slot, 5000) == pattern(seq, 5000)
        torch_pair.receiver._landing_slots.vacate(slot)
    assert torch_pair.broken.empty()


def send_on(pair: TorchPair) -> None:
    for seq in range(1, 100):  # a source learns of its sink's end a moment later
        pair.sender.send(header_of(seq % 2, seq=seq))
        time.sleep(0.02)


@pytest.mark.parametrize("closing", ["source", "sink"])
def test_closing_one_end_of_torch_dist_ends_what_both_wait_for(torch_pair: TorchPair, closing: str) -> None:
    # The fence: no receive is left that could still be written to (I2, I7).
    torch_pair.receiver.header_received(header_of(0))  # its bytes never come
    time.sleep(0.1)
    start_time = time.monotonic()
    (torch_pair.sender if closing == "source" else torch_pair.receiver).close()
    assert torch_pair.broken.get(timeout=5)
    assert time.monotonic() - start_time < 2.0
    with pytest.raises(OSError, match=r"closed|broken"):
        send_on(torch_pair)
    assert torch_pair.landed.empty()
    assert bytes(torch_pair.receiver.body(0, 5000)) == bytes(5000)


def test_a_sink_that_never_comes_does_not_hold_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dist, "MEET_S", 0.5)
    pair = TorchPair()
    with pytest.raises(OSError, match="did not meet"):
        asyncio.run(pair.sender.wait_attached(""))
    pair.sender.close()
    pair.sender.free()
    pair.store.close()


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1|x|y", "127.0.0.1|1|key"])
def test_a_torch_dist_address_where_nobody_is_is_an_error(address: str) -> None:
    receiver = TorchDistReceiver(address, make_slots(), lambda header: None, lambda reason: None, stall_s=1.0)
    with pytest.raises((ProtocolError, OSError)):
        asyncio.run(receiver.attach())
    receiver.close()
    asyncio.run(receiver.free())


def test_a_torch_dist_body_that_is_longer_than_its_header_says_ends_nothing(torch_pair: TorchPair) -> None:
    # I17: the library would end the process.
    torch_pair.sender.buffer(0)[:5000] = pattern(0, 5000)
    torch_pair.sender.send(header_of(0))
    torch_pair.receiver.header_received(make_header(0, 0, link_no=7, num_bytes=64))
    assert torch_pair.landed.get(timeout=5).num_bytes == 64
    assert torch_pair.receiver.body(0, 64) == pattern(0, 64)


def test_both_ends_may_close_while_a_body_is_on_its_way() -> None:
    # I2, I16: whatever the library does with it, no thread of the link stays.
    size = 4 << 20
    store = TorchStore()
    for _ in range(8):
        slots = LandingSlots(link_no=7, stream_no=0, source=Incarnation("p"), num_slots=2, slot_bytes=size)
        sender = TorchDistSender(store, "127.0.0.1", slot_bytes=size)
        broken: queue.Queue[str] = queue.Queue()
        receiver = TorchDistReceiver(sender.address, slots, lambda header: None, broken.put, stall_s=1.0)
        asyncio.run(receiver.attach())
        asyncio.run(sender.wait_attached(""))
        for slot in (0, 1):
            header = make_header(slot, slot, link_no=7, num_bytes=size)
            sender.send(header)
            receiver.header_received(header)
        closing = threading.Thread(target=sender.close)
        closing.start()
        receiver.close()
        closing.join()
        start_time = time.monotonic()
        sender.free()
        asyncio.run(receiver.free())
        assert time.monotonic() - start_time < 3.0
    store.close()


def test_each_end_of_a_torch_dist_pair_listens_at_an_address_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # On another machine the source's address is none that the sink could listen at.
    hosts: dict[int, str] = {}
    make = torch_dist._Pair.__init__

    def note(pair: torch_dist._Pair, store: object, key: str, rank: int, host: str) -> None:
        hosts[rank] = host
        make(pair, store, key, rank, host)

    monkeypatch.setattr(torch_dist._Pair, "__init__", note)
    store, landed = TorchStore(), queue.Queue[Chunk]()
    sender = TorchDistSender(store, "127.0.0.2", slot_bytes=5000)
    receiver = TorchDistReceiver(sender.address, make_slots(), landed.put, lambda reason: None, stall_s=1.0)
    asyncio.run(receiver.attach())
    asyncio.run(sender.wait_attached(""))
    assert hosts == {0: "127.0.0.2", 1: "127.0.0.1"}
    sender.buffer(0)[:5000] = pattern(0, 5000)
    sender.send(header_of(0))
    receiver.header_received(header_of(0))
    assert landed.get(timeout=5).seq == 0
    sender.close()
    sender.free()
    receiver.close()
    asyncio.run(receiver.free())
    store.close()


def test_a_receiving_thread_that_fails_breaks_its_link(torch_pair: TorchPair) -> None:
    # I13
    def explode(header: Chunk) -> None:
        raise RuntimeError("no")

    torch_pair.receiver._on_chunk = explode
    torch_pair.send(header_of(0))
    assert torch_pair.broken.get(timeout=5) == "RuntimeError: no"
