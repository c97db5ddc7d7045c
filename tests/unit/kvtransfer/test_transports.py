"""Transports by themselves: what they refuse to attach to, and what they carry."""

import asyncio
import os
from collections.abc import Callable

import pytest

from pdserve.cluster.base.errors import ProtocolError
from pdserve.kvtransfer.pattern import pattern
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.shm import ShmReceiver, ShmSender

SLOTS = LandingSlots(num_slots=2, slot_bytes=5000)


def attach(address: str) -> ShmReceiver:
    receiver = ShmReceiver(address, SLOTS)
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


def test_the_pattern_tells_sequence_numbers_and_places_apart() -> None:
    assert len(pattern(3, 5000)) == 5000
    assert pattern(3, 5000) != pattern(4, 5000)
    assert pattern(3, 5000)[:1000] != pattern(3, 5000)[1000:2000]
