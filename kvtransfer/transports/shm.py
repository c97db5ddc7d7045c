"""Shared memory: one memfd per link, made by the source, mapped read-only by the sink.

The send buffer *is* the slot: two copies in all, gather and scatter. The memfd has no name, so nothing can be left
behind; the sink opens it through /proc, which needs the same machine, process namespace and user, else the next
transport is taken. Headers travel on the control channel, after the copy. Layout: a page with a nonce (the file behind
PID and number is the one that was offered), then the slots.
"""

import fcntl
import mmap
import os
import secrets
import stat

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.protocol import OnChunk

NONCE_BYTES = 32
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A file that could shrink would kill its readers."""


def _is_sealed(file: int) -> bool:
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False  # no memory file


class ShmSender:
    """The source's end."""

    carries_headers = False

    def __init__(self, *, slot_bytes: int, num_slots: int) -> None:
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_slots = num_slots
        size = mmap.PAGESIZE + num_slots * self._stride
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._fd = os.memfd_create("pdserve-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise
        self._memory[:NONCE_BYTES] = nonce
        self._view = memoryview(self._memory)
        self._is_closed = False
        self.address = f"{os.getpid()}:{self._fd}:{size}:{nonce.hex()}"

    async def wait_attached(self, answer: str) -> None:
        """See SendTransport: the sink's message is enough."""

    def buffer(self, slot: int) -> memoryview:
        """See SendTransport."""
        start = mmap.PAGESIZE + slot * self._stride
        return self._view[start : start + self._stride]

    def send(self, header: Chunk) -> None:
        """See SendTransport: the bytes are there already, the owner posts the header."""
        if self._is_closed:
            raise BrokenPipeError("the link is closed")

    def progress(self) -> float | None:
        """See SendTransport: the bytes are there already."""
        return None

    def trim(self, num_slots: int) -> None:
        """See SendTransport."""
        start = mmap.PAGESIZE + num_slots * self._stride
        self._memory.madvise(mmap.MADV_REMOVE, start, len(self._memory) - start)

    def close(self) -> None:
        """See SendTransport."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._fd)

    def free(self) -> None:
        """See SendTransport."""
        self._view.release()
        self._memory.close()


class ShmReceiver:
    """The sink's end."""

    answer = ""

    def __init__(self, address: str, slots: LandingSlots, on_chunk: OnChunk) -> None:
        self._address = address
        self._landing_slots = slots
        self._on_chunk = on_chunk
        self._stride = -(-slots.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = mmap.PAGESIZE + slots.num_slots * self._stride
        self._memory: mmap.mmap | None = None
        self._view = memoryview(b"")

    async def attach(self) -> None:
        """See ReceiveTransport."""
        try:
            pid, fd, size, nonce = self._address.split(":")
            path = f"/proc/{int(pid)}/fd/{int(fd)}"
            is_right_size = int(size) == self._size
        except ValueError as error:
            raise ProtocolError(f"shm address {self._address!r} is malformed") from error
        if not is_right_size:
            raise ProtocolError(f"shm address offers {size} bytes, {self._size} are expected")
        # Whatever lies there: opening it must not block, and mapping it must not kill.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size != self._size or not _is_sealed(file):
                raise ProtocolError("the file behind the shm address is another one")
            memory = mmap.mmap(file, self._size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        if memory[:NONCE_BYTES].hex() != nonce:
            memory.close()
            raise ProtocolError("the file behind the shm address is another one")
        self._memory = memory
        self._view = memoryview(memory)

    def header_received(self, header: Chunk) -> None:
        """See ReceiveTransport: its bytes are in their slot."""
        self._landing_slots.occupy(header)
        self._on_chunk(header)

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """See ReceiveTransport."""
        start = mmap.PAGESIZE + slot * self._stride
        return self._view[start : start + num_bytes]

    def close(self) -> None:
        """See ReceiveTransport: headers stop with the control channel."""

    async def free(self) -> None:
        """See ReceiveTransport."""
        self._view.release()
        self._view = memoryview(b"")
        if self._memory is not None:
            self._memory.close()
            self._memory = None
