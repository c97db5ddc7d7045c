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
from pdserve.cluster.base.handshake import SocketStream, greet_as_client, greet_as_server
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.endpoint import format_endpoint, parse_endpoint
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk
from pdserve.kvtransfer.transports.slot_buffers import SlotBuffers

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
MAX_HEADER_BYTES = 16 << 10
MAX_KEY_BYTES = 256
CONNECT_S = 5.0
ACCEPT_PAUSE_S = 0.1
MAX_GREETINGS = 64
"""Connections that have not shown the token yet; further ones are closed."""


class TcpListener:
    """Accepts the data connections of a worker's outgoing links, each named by a key that the sink was offered."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._greetings: set[asyncio.Task[None]] = set()
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}
        self.host = ""
        self.port = 0

    async def start(self, host: str) -> None:
        """Listen on a free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._task = asyncio.create_task(self._accept(), name="data connections")

    async def stop(self) -> None:
        """Stop listening."""
        tasks = [task for task in (self._task, *self._greetings) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def expect(self, key: str) -> "asyncio.Future[socket.socket]":
        """Return a future of the connection that names `key`."""
        return self._expected.setdefault(key, asyncio.get_running_loop().create_future())

    def forget(self, key: str) -> None:
        """Nobody waits for the key any more."""
        future = self._expected.pop(key, None)
        if future is not None and not future.done():
            future.cancel()

    async def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                logger.warning("a data connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._greetings) >= MAX_GREETINGS:
                connection.close()
                continue
            task = asyncio.create_task(self._greet(connection))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                stream = SocketStream(connection)
                await greet_as_server(stream, self._token)
                size = int.from_bytes(await stream.read_exactly(LENGTH_BYTES))
                if not 0 < size <= MAX_KEY_BYTES:
                    raise ProtocolError(f"a link key of {size} bytes")
                key = (await stream.read_exactly(size)).decode()
            future = self._expected.pop(key, None)
            if future is None or future.done():
                raise ProtocolError("a data connection for a link that was not offered")
            future.set_result(connection)
        except (ProtocolError, OSError, asyncio.IncompleteReadError, TimeoutError, UnicodeDecodeError) as error:
            logger.warning("refused a data connection: %s", error or type(error).__name__)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise


class TcpSender:
    """The source's end."""

    carries_headers = True

    def __init__(self, listener: TcpListener, key: str, *, slot_bytes: int) -> None:
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
        _prepare(self._socket)

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
        host, port, key = parse_endpoint("tcp", self._address)
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(connection, (host, port))
                stream = SocketStream(connection)
                await greet_as_client(stream, self._token)
                name = key.encode()
                await stream.write(len(name).to_bytes(LENGTH_BYTES) + name)
        except BaseException as error:
            connection.close()
            if isinstance(error, asyncio.IncompleteReadError | TimeoutError):
                raise ProtocolError(f"the source's data port did not answer: {type(error).__name__}") from error
            raise
        _prepare(connection)
        self._socket = connection
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


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
