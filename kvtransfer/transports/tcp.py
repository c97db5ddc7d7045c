"""TCP: bulk bytes on a connection of their own, moved by threads; headers in front of their bytes.

The receiver stores: it reads a header, checks its size against the slot, and receives the bytes into its own landing
memory. So no fence is needed: when the connection is closed nobody writes any more.
"""

import asyncio
import logging
import socket
import threading

from pdserve.cluster.base.codec import Codec
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.data_port import CONNECT_S, LENGTH_BYTES, DataPort, connect_data, prepare_socket
from pdserve.kvtransfer.transports.endpoint import format_endpoint
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk
from pdserve.kvtransfer.transports.slot_buffers import SlotBuffers

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10


class TcpSender:
    """The source's end."""

    carries_headers = True

    def __init__(self, listener: DataPort, key: str, *, slot_bytes: int) -> None:
        self._listener = listener
        self._key = key
        self._connected = listener.expect(key)
        self._socket: socket.socket | None = None
        self._buffers = SlotBuffers(slot_bytes)
        self._codec = Codec()
        self._is_closed = False
        self.address = format_endpoint(listener.host, listener.port, key)

    async def wait_attached(self, answer: str) -> None:
        """See SendTransport."""
        try:
            self._socket = await asyncio.wait_for(self._connected, CONNECT_S)
        except asyncio.CancelledError:
            if self._is_closed:
                raise BrokenPipeError("the link is closed") from None
            raise
        except TimeoutError:
            raise BrokenPipeError("the sink did not connect") from None
        prepare_socket(self._socket)

    def buffer(self, slot: int) -> memoryview:
        """See SendTransport."""
        return self._buffers.view(slot)

    def send(self, header: Chunk) -> None:
        """See SendTransport."""
        if self._socket is None or self._is_closed:
            raise BrokenPipeError("the link is closed")
        head = self._codec.encode(header)
        parts = [memoryview(len(head).to_bytes(LENGTH_BYTES) + head), self.buffer(header.slot)[: header.num_bytes]]
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def progress(self) -> float | None:
        """See SendTransport: what was sent is the kernel's."""
        return None

    def trim(self, num_slots: int) -> None:
        """See SendTransport."""
        self._buffers.trim(num_slots)

    def close(self) -> None:
        """See SendTransport."""
        self._is_closed = True
        self._listener.forget(self._key)
        if self._connected.done() and not self._connected.cancelled():
            _shut(self._connected.result())

    def free(self) -> None:
        """See SendTransport."""
        self._buffers.trim(0)
        if self._connected.done() and not self._connected.cancelled():
            self._connected.result().close()


class TcpReceiver:
    """The sink's end: a thread that reads headers and lands their bytes."""

    answer = ""

    def __init__(self, address: str, token: bytes, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken) -> None:
        self._address = address
        self._token = token
        self._landing_slots = slots
        self._on_chunk = on_chunk
        self._on_broken = on_broken
        self._slots = SlotBuffers(slots.slot_bytes)
        self._codec = Codec()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._read, name="tcp link", daemon=True)

    async def attach(self) -> None:
        """See ReceiveTransport."""
        self._socket = await connect_data(self._address, self._token)
        self._thread.start()

    def header_received(self, header: Chunk) -> None:
        """See ReceiveTransport."""
        raise ProtocolError("a chunk header on the control channel of a tcp link")

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """See ReceiveTransport."""
        return self._slots.view(slot)[:num_bytes]

    def close(self) -> None:
        """See ReceiveTransport."""
        if self._socket is not None:
            _shut(self._socket)

    async def free(self) -> None:
        """See ReceiveTransport."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._slots.trim(0)

    def _read(self) -> None:
        assert self._socket is not None
        reason = "the source closed it"
        try:
            while (header := self._read_header(self._socket)) is not None:
                _receive(self._socket, self._landing(header))
                self._on_chunk(header)
        except (OSError, ProtocolError) as error:
            reason = str(error)
        except Exception as error:
            # The barrier of this thread: its link ends, the process goes on (I13).
            logger.exception("a tcp link failed")
            reason = f"{type(error).__name__}: {error}"
        self._socket.close()
        self._on_broken(reason)

    def _read_header(self, connection: socket.socket) -> Chunk | None:
        head = bytearray(LENGTH_BYTES)
        if not _receive(connection, memoryview(head), may_end=True):
            return None
        size = int.from_bytes(head)
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ProtocolError(f"a chunk header of {size} bytes")
        body = bytearray(size)
        _receive(connection, memoryview(body))
        message = self._codec.decode(bytes(body))
        if not isinstance(message, Chunk):
            raise ProtocolError(f"unexpected {type(message).__name__} on a data connection")
        return message

    def _landing(self, header: Chunk) -> memoryview:
        self._landing_slots.occupy(header)
        return self._slots.view(header.slot)[: header.num_bytes]


def _shut(connection: socket.socket) -> None:
    """End both directions: wakes a thread that blocks on the socket. The thread that reads it closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("already gone: %s", error)


def _receive(connection: socket.socket, into: memoryview, *, may_end: bool = False) -> bool:
    """Fill `into`; False if the stream ended before its first byte and `may_end`. Raises ProtocolError if it is cut."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if count == 0:
            if may_end and done == 0:
                return False
            raise ProtocolError("the data connection was cut in the middle of a chunk")
        done += count
    return True
