"""NIXL: one-sided writes into the sink's landing region, each with its header as the write's notification.

The sink's region is its slots; its base address and stride, and the agent's metadata, reach the source when the sink
has attached. NIXL's own serialisation of descriptors is pickle, so it is not used (I17). The backend is UCX (host
memory here); others are passed through by name, untested.

NIXL has no event to wait for and no way to abort a write:

- One *poller* thread per agent looks for notifications: every 50 µs to 0.5 ms while the worker expects chunks, else
  every 50 ms (idle tests come without warning). A writer polls its own write.
- A write that was begun may still store after its link is given up. So a fenced landing region loses its pages and its
  access rights but keeps its addresses for as long as the process lives: nobody else's memory is ever there. The
  source keeps the buffer of a write that has not ended.
"""

import ctypes
import logging
import mmap
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

from pdserve.cluster.base.codec import Codec
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk

logger = logging.getLogger(__name__)

KEY_BYTES = 16
MAX_HEADER_BYTES = 16 << 10
MAX_METADATA_BYTES = 1 << 20
MIN_WRITE_BYTES = 16 << 10
POLL_MIN_S, POLL_MAX_S = 50e-6, 0.5e-3
PARKED_POLL_S = 50e-3
QUICK_POLLS, WRITE_POLL_MAX_S = 20, 1e-3
"""A write is looked at so often without a pause: small ones end within microseconds."""
LAST_WRITE_S = 2.0
"""How long a closing link waits for the write in hand."""
_MEMORY = "DRAM"
_OWN = "NIXL_INIT_AGENT"

Handler = Callable[[bytes], None]
OnFailure = Callable[[str], None]


class NixlAgent:
    """The NIXL agent of one worker, made by `prepare`, else when its first link needs it. Callable from any thread."""

    def __init__(self, backend: str = "UCX", is_receiving: Callable[[], bool] = lambda: False) -> None:
        """`is_receiving` is called by the poller: True while chunks are expected soon."""
        self._backend = backend
        self._is_receiving = is_receiving
        self._lock = threading.Lock()
        self._made: Any = None
        self._peers: dict[str, int] = {}
        self._handlers: dict[bytes, tuple[Handler, OnFailure]] = {}
        self._poller: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._kept: list[object] = []

    def prepare(self) -> None:
        """Make the agent now, so that no link waits for it; where it cannot be had, links will say so."""
        try:
            self.get()
        except OSError as error:
            logger.warning("links over nixl will not open: %s", error)

    def get(self) -> Any:
        """Return the library's agent. Raises OSError if it cannot be had here. Takes half a second the first time."""
        with self._lock:
            if self._is_closed:
                raise OSError("the worker is stopping")
            if self._made is None:
                self._made = _make_agent(self._backend)
            return self._made

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer's registered memory known; return its name. Raises ProtocolError."""
        agent = self.get()
        with self._lock:
            try:
                name = agent.add_remote_agent(metadata)
            except Exception as error:  # the binding raises types of its own
                raise ProtocolError(f"the peer's NIXL metadata does not load: {error}") from error
            text = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[text] = self._peers.get(text, 0) + 1
            return text

    def drop_peer(self, name: str) -> None:
        """A link to the peer has ended."""
        with self._lock:
            self._peers[name] -= 1
            if self._peers[name] == 0:
                del self._peers[name]
                _quietly(lambda: self._made.remove_remote_agent(name), "forgetting a peer")

    def expect(self, key: bytes, handler: Handler, on_failure: OnFailure) -> None:
        """Hand notifications that begin with `key` to `handler`, on the poller's thread, and its failure too."""
        with self._lock:
            self._handlers[key] = handler, on_failure
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="nixl poller", daemon=True)
                self._poller.start()
        self._wake.set()

    def forget(self, key: bytes) -> None:
        """Drop what still comes for a key."""
        with self._lock:
            self._handlers.pop(key, None)

    def wake(self) -> None:
        """Chunks are expected from now on."""
        self._wake.set()

    def keep(self, held: object) -> None:
        """Never free something: a write that cannot be stopped may still touch it."""
        with self._lock:
            self._kept.append(held)

    def close(self) -> None:
        """Stop the poller; links have ended before."""
        with self._lock:
            self._is_closed = True
            poller = self._poller
        self._wake.set()
        if poller is not None:
            poller.join()
        with self._lock:
            self._made = None

    def _poll(self) -> None:
        try:
            self._poll_until_closed()
        except Exception as error:
            # The barrier of this thread: every link to this worker ends, and the next one starts another poller (I13).
            logger.exception("the NIXL poller failed")
            with self._lock:
                self._poller = None
                failed, self._handlers = list(self._handlers.values()), {}
            for _, on_failure in failed:
                on_failure(f"the NIXL poller failed: {type(error).__name__}: {error}")

    def _poll_until_closed(self) -> None:
        agent = self.get()
        pause_s = POLL_MIN_S
        while not self._is_closed:
            self._wake.clear()
            found = agent.get_new_notifs()
            if found:
                pause_s = POLL_MIN_S
                for messages in found.values():
                    for message in messages:
                        self._dispatch(message)
                continue
            is_busy = self._is_receiving()
            pause_s = min(2 * pause_s, POLL_MAX_S)
            if self._wake.wait(pause_s if is_busy else PARKED_POLL_S):
                pause_s = POLL_MIN_S

    def _dispatch(self, message: bytes) -> None:
        with self._lock:
            handler, _ = self._handlers.get(message[:KEY_BYTES], (None, None))
        if handler is None:
            logger.debug("a NIXL notification for a link that has ended")
            return
        handler(message[KEY_BYTES:])


def _make_agent(backend: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise OSError(f"nixl is not usable here: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = nixl_agent_config(
        backends=[backend], enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    try:
        agent = nixl_agent(secrets.token_hex(8), config)
    except Exception as error:  # the binding raises types of its own
        raise OSError(f"no NIXL agent with backend {backend}: {error}") from error
    if backend not in agent.backends:
        raise OSError(f"NIXL has no backend {backend} here; it has {', '.join(agent.plugin_list)}")
    return agent


class _Region:
    """Registered host memory: slots of one stride."""

    def __init__(self, agent: NixlAgent, *, slot_bytes: int, num_slots: int) -> None:
        self.stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_slots = num_slots
        self._library: Any = agent.get()
        self._memory = mmap.mmap(-1, self.stride * num_slots)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        size = self.stride * num_slots
        try:
            self._registered = self._library.register_memory([(self.address, size, 0, "")], _MEMORY)
        except Exception as error:  # the binding raises types of its own
            raise OSError(f"NIXL cannot register {size} bytes: {error}") from error

    def slot(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        return self.view[slot * self.stride : (slot + 1) * self.stride]

    def places(self) -> list[tuple[int, int, int]]:
        """Return the beginnings of the slots as the library's descriptors, see _places."""
        return _places(self.address, self.stride, self.num_slots)

    def deregister(self) -> None:
        """The library does not use it any more."""
        _quietly(lambda: self._library.deregister_memory(self._registered), "deregistering memory")
        self._library = None

    def fence(self) -> None:
        """Give back the pages and forbid any access; the addresses stay taken for as long as the object lives."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(len(self._memory)), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect of a landing region")


def _quietly(act: Callable[[], object], what: str) -> None:
    """Release something of the library: an error of it must not keep the rest from being released."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 — the binding raises types of its own
        logger.warning("NIXL: %s failed: %s", what, error)


def _sizes(stride: int) -> list[int]:
    """Return the lengths that a write may have: a chunk goes with the shortest that holds it."""
    sizes = [stride]
    while sizes[-1] > MIN_WRITE_BYTES:
        sizes.append(-(-sizes[-1] // 2))
    return sizes[::-1]


def _places(address: int, stride: int, num_slots: int) -> list[tuple[int, int, int]]:
    """Return descriptors of each slot in each length: prepared once, where one made for each chunk would cost more."""
    sizes = _sizes(stride)
    return [(address + slot * stride, size, 0) for slot in range(num_slots) for size in sizes]


class NixlSender:
    """The source's end."""

    carries_headers = True

    def __init__(self, agent: NixlAgent, *, slot_bytes: int, num_slots: int) -> None:
        """Raises OSError if NIXL cannot be used here."""
        self._agent = agent
        self._region = _Region(agent, slot_bytes=slot_bytes, num_slots=num_slots)
        self._sizes = _sizes(self._region.stride)
        self._codec = Codec()
        self._is_closed = False
        self._peer: str | None = None
        self._key = b""
        self._handles: tuple[Any, Any] | None = None
        self._to_release: list[Any] = []
        self._pending: Any = None
        self._num_polls = 0
        self.address = "nixl"

    async def wait_attached(self, answer: str) -> None:
        """See SendTransport: `answer` says where the sink's slots are."""
        key, address, stride, metadata = _parse_answer(answer)
        if stride != self._region.stride:
            raise ProtocolError(f"slots of {stride} bytes there, {self._region.stride} here")
        self._peer = self._agent.add_peer(metadata)
        self._key = key
        library = self._agent.get()
        try:
            own = library.prep_xfer_dlist(_OWN, self._region.places(), _MEMORY)
            self._to_release.append(own)
            remote = library.prep_xfer_dlist(self._peer, _places(address, stride, self._region.num_slots), _MEMORY)
            self._to_release.append(remote)
            self._handles = own, remote
        except Exception as error:  # the binding raises types of its own
            raise ProtocolError(f"the sink's slots cannot be written: {error}") from error

    def buffer(self, slot: int) -> memoryview:
        """See SendTransport."""
        return self._region.slot(slot)

    def send(self, header: Chunk) -> None:
        """See SendTransport: waits for the write before, and begins this one: the next chunk is gathered meanwhile."""
        while (pause_s := self.progress()) is not None:
            time.sleep(pause_s)
        assert self._handles is not None, "checked by progress"
        library, (own, remote) = self._agent.get(), self._handles
        notice = self._key + self._codec.encode(header)
        place = header.slot * len(self._sizes) + bisect_left(self._sizes, header.num_bytes)
        try:
            self._pending = library.make_prepped_xfer("WRITE", own, [place], remote, [place], notice)
            library.transfer(self._pending)
        except Exception as error:  # the binding raises types of its own
            raise BrokenPipeError(f"a NIXL write failed: {error}") from error
        self._num_polls = 0

    def progress(self) -> float | None:
        """See SendTransport: NIXL moves a write only while somebody looks at it."""
        if self._handles is None or self._is_closed:
            raise BrokenPipeError("the link is closed")
        if self._pending is None:
            return None
        try:
            state = self._write_state()
            if state != "PROC":
                self._end_write()
        except Exception as error:  # the binding raises types of its own
            raise BrokenPipeError(f"a NIXL write failed: {error}") from error
        if state == "PROC":
            self._num_polls += 1
            late = self._num_polls - QUICK_POLLS
            return 0.0 if late < 0 else min(POLL_MIN_S * 2**late, WRITE_POLL_MAX_S)
        if state != "DONE":
            raise BrokenPipeError(f"a NIXL write ended in state {state}")
        return None

    def _write_state(self) -> str:
        state: str = self._agent.get().check_xfer_state(self._pending)
        return state

    def _end_write(self) -> None:
        self._agent.get().release_xfer_handle(self._pending)
        self._pending = None

    def trim(self, num_slots: int) -> None:
        """See SendTransport: registered pages stay, a network card knows them by their physical place."""

    def close(self) -> None:
        """See SendTransport."""
        self._is_closed = True

    def free(self) -> None:
        """See SendTransport."""
        if not self._last_write_ended():
            logger.error("a NIXL write has not ended: its buffer is kept for as long as the process lives")
            self._agent.keep((self._region, self._pending, self._handles))
            return
        for handle in self._to_release:
            _quietly(partial(self._agent.get().release_dlist_handle, handle), "releasing a descriptor list")
        self._to_release.clear()
        self._handles = None
        self._region.deregister()
        if self._peer is not None:
            self._agent.drop_peer(self._peer)
            self._peer = None

    def _last_write_ended(self) -> bool:
        if self._pending is None:
            return True
        deadline = time.monotonic() + LAST_WRITE_S
        try:
            while self._write_state() == "PROC":
                if time.monotonic() > deadline:
                    return False
                time.sleep(WRITE_POLL_MAX_S)
            self._end_write()
        except Exception as error:  # noqa: BLE001 — the binding raises types of its own; a write that failed has ended
            logger.debug("the last NIXL write failed: %s", error)
            self._pending = None
        return True


class NixlReceiver:
    """The sink's end."""

    def __init__(self, agent: NixlAgent, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken) -> None:
        self._agent = agent
        self._slots = slots
        self._on_chunk = on_chunk
        self._on_broken = on_broken
        self._key = secrets.token_bytes(KEY_BYTES)
        self._codec = Codec()
        self._region: _Region | None = None
        self.answer = ""

    async def attach(self) -> None:
        """See ReceiveTransport: makes the landing region; the source attaches to it."""
        self._region = _Region(self._agent, slot_bytes=self._slots.slot_bytes, num_slots=self._slots.num_slots)
        metadata = self._agent.get().get_agent_metadata()
        self.answer = f"{self._key.hex()}:{self._region.address}:{self._region.stride}:{metadata.hex()}"
        self._agent.expect(self._key, self._landed, self._on_broken)

    def header_received(self, header: Chunk) -> None:
        """See ReceiveTransport."""
        raise ProtocolError("a chunk header on the control channel of a nixl link")

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """See ReceiveTransport."""
        assert self._region is not None, "chunks come after attaching"
        return self._region.slot(slot)[:num_bytes]

    def close(self) -> None:
        """See ReceiveTransport: what still lands is announced to nobody."""
        self._agent.forget(self._key)

    async def free(self) -> None:
        """See ReceiveTransport."""
        region, self._region = self._region, None
        if region is not None:
            region.deregister()
            region.fence()
            self._agent.keep(region)

    def _landed(self, head: bytes) -> None:
        try:
            if len(head) > MAX_HEADER_BYTES:
                raise ProtocolError(f"a chunk header of {len(head)} bytes")
            header = self._codec.decode(head)
            if not isinstance(header, Chunk):
                raise ProtocolError("a notification that is no chunk header")
            self._slots.occupy(header)
        except ProtocolError as error:
            self._on_broken(str(error))
            return
        self._on_chunk(header)


def _parse_answer(answer: str) -> tuple[bytes, int, int, bytes]:
    try:
        key, address, stride, metadata = answer.split(":")
        parsed = bytes.fromhex(key), int(address), int(stride), bytes.fromhex(metadata)
    except ValueError as error:
        raise ProtocolError("the sink's NIXL answer is malformed") from error
    if len(parsed[0]) != KEY_BYTES or len(parsed[3]) > MAX_METADATA_BYTES or parsed[1] <= 0 or parsed[2] <= 0:
        raise ProtocolError("the sink's NIXL answer is malformed")
    return parsed
