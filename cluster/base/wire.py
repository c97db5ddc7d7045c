"""Authenticated message channels over TCP: one class for every pair of processes.

A frame is a 4-byte big-endian length and a body (codec.py). Before the first frame both sides prove that they hold the
deployment token (handshake.py). The length is checked before anything is allocated. Each side sends a heartbeat every
`heartbeat_s`; a channel that hears nothing for `silence_s` closes itself: TCP alone never notices a frozen peer.
Handlers run on the event loop and must not block.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.base.codec import Codec
from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.handshake import greet_as_client, greet_as_server
from pdserve.cluster.base.messages import Heartbeat, Message
from pdserve.cluster.base.worker_info import Endpoint

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """Limits and deadlines of a channel."""

    token: bytes
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    connect_s: float = 5.0
    max_frame_bytes: int = 16 << 20
    max_buffer_bytes: int = 64 << 20
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0


class ChannelHandler(Protocol):
    """Receives what happens on channels; called on the event loop, never concurrently."""

    def channel_opened(self, channel: "Channel") -> None:
        """The handshake succeeded; posting is allowed."""

    def message_received(self, channel: "Channel", message: Message) -> None:
        """A message other than a heartbeat arrived."""

    def channel_closed(self, channel: "Channel", reason: str) -> None:
        """The channel ended; called once, after channel_opened."""


class Channel:
    """One open connection. Made by ChannelServer and ChannelClient only."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, settings: ChannelSettings, peer: str
    ) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._settings = settings
        self._codec = Codec()
        self._close_reason: str | None = None
        self._heard_time = asyncio.get_running_loop().time()

    @property
    def is_open(self) -> bool:
        """False from the moment either side began to close."""
        return self._close_reason is None

    def post(self, message: Message) -> None:
        """Queue a message for sending; raises ChannelClosedError on a closed channel.

        A peer that lets more than `max_buffer_bytes` pile up is cut off: it would hold our memory for ever.
        """
        if self._close_reason is not None:
            raise ChannelClosedError(f"channel to {self.peer} is closed: {self._close_reason}")
        if self._writer.transport.is_closing():
            raise ChannelClosedError(f"channel to {self.peer} has lost its connection")
        body = self._codec.encode(message)
        if len(body) > self._settings.max_frame_bytes:
            raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes is over the frame limit")
        self._writer.write(len(body).to_bytes(LENGTH_BYTES) + body)
        if self._writer.transport.get_write_buffer_size() > self._settings.max_buffer_bytes:
            self.close("the peer reads too slowly")

    def close(self, reason: str) -> None:
        """Close now; what is still buffered is dropped. The first reason wins."""
        if self._close_reason is None:
            self._close_reason = reason
            self._writer.transport.abort()

    async def run(self, handler: ChannelHandler) -> str:
        """Deliver messages to `handler` until the channel ends; return why it ended."""
        heartbeat = asyncio.create_task(self._beat())
        reason = "cancelled"
        try:
            handler.channel_opened(self)
            reason = await self._read_frames(handler)
        except ChannelClosedError as error:
            # A handler posted to a connection that had just gone.
            reason = str(error)
        except Exception as error:
            logger.exception("a handler failed on the channel to %s", self.peer)
            reason = f"a handler failed: {type(error).__name__}"
        finally:
            heartbeat.cancel()
            self.close(reason)
            handler.channel_closed(self, self._close_reason or reason)
        return self._close_reason or reason

    async def _read_frames(self, handler: ChannelHandler) -> str:
        loop = asyncio.get_running_loop()
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
                if not 0 < length <= self._settings.max_frame_bytes:
                    raise ProtocolError(f"frame of {length} bytes is over the limit")
                message = self._codec.decode(await self._reader.readexactly(length))
                self._heard_time = loop.time()
                if not isinstance(message, Heartbeat):
                    handler.message_received(self, message)
        except asyncio.IncompleteReadError:
            return "the peer closed the connection"
        except ProtocolError as error:
            logger.warning("protocol error peer=%s: %s", self.peer, error)
            return f"protocol error: {error}"
        except OSError as error:
            return f"connection lost: {error}"

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while self.is_open and not self._writer.transport.is_closing():
            self.post(Heartbeat())
            await asyncio.sleep(self._settings.heartbeat_s)
            if loop.time() - self._heard_time > self._settings.silence_s:
                self.close(f"nothing heard for {self._settings.silence_s:g} s")


class _Stream:
    """An asyncio connection as the handshake's ByteStream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read_exactly(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)


class ChannelServer:
    """Accepts channels on one port."""

    def __init__(self, settings: ChannelSettings, handler: ChannelHandler) -> None:
        self._settings = settings
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> Endpoint:
        """Listen on `host`; return where. Port 0 takes a free one."""
        self._server = await asyncio.start_server(self._accept, host, port)
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        return Endpoint(host=bound_host, port=bound_port)

    async def stop(self) -> None:
        """Stop listening and close every channel."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # None if the peer is gone already.
        peer = "{}:{}".format(*(writer.get_extra_info("peername") or ("nobody", 0))[:2])
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await greet_as_server(_Stream(reader, writer), self._settings.token)
            await Channel(reader, writer, settings=self._settings, peer=peer).run(self._handler)
        except (ProtocolError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            logger.warning("refused a connection peer=%s: %s", peer, error or type(error).__name__)
        except asyncio.CancelledError:
            logger.debug("closing the channel of peer=%s: the server stops", peer)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)


class ChannelClient:
    """Keeps one channel to a peer open: resolves it, connects, and connects again when the channel ends."""

    def __init__(
        self,
        settings: ChannelSettings,
        handler: ChannelHandler,
        resolve: Callable[[], Awaitable[Endpoint]],
        *,
        name: str,
    ) -> None:
        self._settings = settings
        self._handler = handler
        self._resolve = resolve
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin connecting in the background."""
        self._task = asyncio.create_task(self._keep_connected(), name=f"channel to {self._name}")

    async def stop(self) -> None:
        """Close the channel and stop reconnecting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        wait_s = self._settings.retry_min_s
        while True:
            try:
                channel = await self._connect()
            except (ChannelClosedError, ProtocolError) as error:
                logger.debug("cannot reach %s yet: %s", self._name, error)
            else:
                wait_s = self._settings.retry_min_s
                reason = await channel.run(self._handler)
                logger.info("channel to %s ended: %s", self._name, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._settings.retry_max_s)

    async def _connect(self) -> Channel:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._settings.connect_s):
                endpoint = await self._resolve()
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
                await greet_as_client(_Stream(reader, writer), self._settings.token)
                return Channel(reader, writer, settings=self._settings, peer=self._name)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, OSError | asyncio.IncompleteReadError | TimeoutError | LookupError):
                raise ChannelClosedError(f"{type(error).__name__}: {error}") from error
            raise
