"""A TCP proxy whose connections can be made to swallow everything: the network fault that no socket reports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.cluster.base.worker_info import Endpoint

CHUNK = 64 << 10


class BlackHole:
    """Forwards connections to `target`.

    Attributes:
        num_swallowed: connections that were open when `swallow` was called, over all calls.
    """

    def __init__(self) -> None:
        self.target: Endpoint | None = None
        self.num_swallowed = 0
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._swallowed: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return Endpoint(host=host, port=port)

    def swallow(self) -> None:
        """From now on nothing passes on the connections that are open; they stay open. New ones work."""
        self._swallowed |= self._pipes
        self.num_swallowed += len(self._pipes) // 2

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Close everything."""
        assert self._server is not None
        self._server.close()
        for task in list(self._pipes):
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.target is not None, "the target is known before anyone connects"
        far_reader, far_writer = await asyncio.open_connection(self.target.host, self.target.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pipe(source, sink))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)
            task.add_done_callback(self._swallowed.discard)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK):
                if asyncio.current_task() not in self._swallowed:
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def running_black_hole() -> AsyncIterator[BlackHole]:
    """A proxy that forwards until told otherwise."""
    hole = BlackHole()
    await hole.start()
    try:
        yield hole
    finally:
        await hole.stop()
