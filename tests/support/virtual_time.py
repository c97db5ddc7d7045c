"""An event loop whose time passes only when nothing can run, with connections in memory: seconds cost microseconds.

What runs on it is deterministic: no thread, no socket, no clock of the machine. Every connection has an owner at each
end (the worker on whose behalf it was made), so that a test can cut, freeze or kill a worker as its network would.
"""

import asyncio
import contextvars
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("OWNER", default="test")
"""On whose behalf the present task opens connections and servers."""


class DeadlockError(AssertionError):
    """Nothing can run, and nothing waits for a time: the test would hang."""


class _NoIO(selectors.BaseSelector):
    """Nothing to select from: waiting is passing time."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        if timeout is None:
            raise DeadlockError("nothing can run and nothing waits for a time")
        self.loop.now += timeout
        return []

    def close(self) -> None:
        self._keys.clear()

    def get_map(self) -> Any:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        selector = _NoIO()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0
        self.network = Network(self, rng)

    def time(self) -> float:
        """The virtual time."""
        return self.now

    def _write_to_self(self) -> None:
        """Nobody sleeps in select."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run it here and now."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 — whoever awaits it gets it
            future.set_exception(error)
        return future

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Listen in memory."""
        return self.network.listen(protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Connect in memory."""
        return await self.network.connect(protocol_factory, port)


class _Address:
    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "virtual", self._port


class _Server:
    def __init__(self, owner: str, factory: Callable[[], asyncio.Protocol], port: int, network: "Network") -> None:
        self.owner = owner
        self.factory = factory
        self.sockets = [_Address(port)]
        self._port = port
        self._network = network

    def close(self) -> None:
        self._network.servers.pop(self._port, None)


class _End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: "Network", owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.peer: _End | None = None
        self.protocol: asyncio.Protocol | None = None
        self._network = network
        self._is_closed = False
        self._sent_until = 0.0
        self._arrived: deque[bytes] = deque()

    def start(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        network, peer = self._network, self.peer
        if self._is_closed or peer is None or not network.passes(self.owner, peer.owner):
            return
        loop = network.loop
        # Strictly later than the one before: timers of equal times come in any order.
        self._sent_until = max(self._sent_until + 1e-7, loop.time() + network.draw_latency())
        loop.call_at(self._sent_until, peer.receive, bytes(data))

    def receive(self, data: bytes) -> None:
        if not self._is_closed and self.protocol is not None:
            self.protocol.data_received(data)

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._network.ends.discard(self)
        self._network.loop.call_soon(self._lost)
        peer = self.peer
        if peer is not None and self._network.passes(self.owner, peer.owner):
            self._network.loop.call_later(self._network.draw_latency(), peer.hung_up)

    def hung_up(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._network.ends.discard(self)
            self._lost()

    def _lost(self) -> None:
        if self.protocol is not None:
            self.protocol.connection_lost(None)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("virtual", 0) if name == "peername" else default

    def pause_reading(self) -> None:
        """Never."""

    def resume_reading(self) -> None:
        """Never."""


class Network:
    """Who can reach whom."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.servers: dict[int, _Server] = {}
        self.ends: set[_End] = set()
        self._rng = rng
        self._next_port = 1
        self._frozen: set[str] = set()
        self._dead: set[str] = set()

    def draw_latency(self) -> float:
        """Seconds from one end to the other."""
        return self._rng.uniform(0.0001, 0.002)

    def passes(self, one: str, other: str) -> bool:
        """False if what one sends does not arrive at the other."""
        return not ({one, other} & (self._frozen | self._dead))

    def is_gone(self, owner: str) -> bool:
        """True for one that was frozen or killed."""
        return owner in self._frozen or owner in self._dead

    def freeze(self, owner: str) -> None:
        """Nothing reaches it and nothing leaves it; nobody is told."""
        self._frozen.add(owner)

    def kill(self, owner: str) -> None:
        """Its connections break, and its servers are gone."""
        self.servers = {port: server for port, server in self.servers.items() if server.owner != owner}
        for end in sorted((end for end in self.ends if end.owner == owner), key=id):
            peer = end.peer
            end.abort()
            if peer is not None:
                self.loop.call_later(self.draw_latency(), peer.hung_up)
        self._dead.add(owner)

    def cut(self, one: str, other: str) -> None:
        """Break the connections between two; both may connect again."""
        for end in [end for end in self.ends if end.owner == one and end.peer is not None and end.peer.owner == other]:
            end.abort()

    def listen(self, factory: Callable[[], asyncio.Protocol]) -> _Server:
        """See VirtualLoop."""
        port, self._next_port = self._next_port, self._next_port + 1
        self.servers[port] = _Server(OWNER.get(), factory, port, self)
        return self.servers[port]

    async def connect(self, factory: Callable[[], asyncio.Protocol], port: int) -> tuple[_End, asyncio.Protocol]:
        """See VirtualLoop."""
        owner = OWNER.get()
        await asyncio.sleep(self.draw_latency())
        server = self.servers.get(port)
        if server is None or owner in self._dead:
            raise ConnectionRefusedError(f"nobody listens at {port}")
        if not self.passes(owner, server.owner):
            await asyncio.sleep(3600.0)
        near, far = _End(self, owner), _End(self, server.owner)
        near.peer, far.peer = far, near
        self.ends |= {near, far}
        accepted, protocol = server.factory(), factory()
        contextvars.copy_context().run(self._start_as, server.owner, far, accepted)
        near.start(protocol)
        return near, protocol

    def _start_as(self, owner: str, end: _End, protocol: asyncio.Protocol) -> None:
        OWNER.set(owner)
        end.start(protocol)


def run_virtual(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run a coroutine to its end on a virtual loop, and close the loop."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
