"""Plain TCP connections for bulk bytes, beside the channels: authenticated like them, then used by blocking threads."""

import asyncio
import logging
import socket

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.handshake import SocketStream, greet_as_client, greet_as_server
from pdserve.kvtransfer.transports.endpoint import parse_endpoint

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
MAX_KEY_BYTES = 256
CONNECT_S = 5.0
ACCEPT_PAUSE_S = 0.1
MAX_GREETINGS = 64
"""Connections that have not shown the token yet; further ones are closed."""


class DataPort:
    """Accepts connections that each name a key: of a rank's links, and at rank 0 those of its steps."""

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


async def connect_data(address: str, token: bytes) -> socket.socket:
    """Return a connection to the port and key that an address names. Raises OSError or ProtocolError."""
    host, port, key = parse_endpoint("tcp", address)
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(connection, (host, port))
            stream = SocketStream(connection)
            await greet_as_client(stream, token)
            name = key.encode()
            await stream.write(len(name).to_bytes(LENGTH_BYTES) + name)
    except BaseException as error:
        connection.close()
        if isinstance(error, asyncio.IncompleteReadError | TimeoutError):
            raise ProtocolError(f"the data port did not answer: {type(error).__name__}") from error
        raise
    prepare_socket(connection)
    return connection


def prepare_socket(connection: socket.socket) -> None:
    """Make a connection ready for blocking threads."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
