"""torch.distributed: one process group per link, of two ranks and without the default group. Gloo on CPU.

The source hosts the TCPStore over which a pair finds itself, under the link's secret key. It posts a send, then its
header goes over the control channel, and the sink posts the receive of a whole slot (a body that is longer than a
receive ends the process in the library; a shorter one is found by its checksum). The source waits for no send: the
CREDIT of a slot says that its bytes have gone.

The library knows no abort for Gloo, but an operation that times out closes its pair, and with it the others, at both
ends: so a receive that nobody answers, waited for a millisecond, is the abort. It does not always end a receive whose
body is half here; that one ends by its own time-out, and the slots are held until the receiving thread has ended (the
fence).

Nothing that comes over the store or the pair is unpickled. The store is not authenticated: it holds the pairs'
addresses, under keys that only the two workers know.
"""

import asyncio
import logging
import queue
import secrets
import threading
from datetime import timedelta
from typing import Any

import torch

from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.endpoint import format_endpoint, parse_endpoint
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk
from pdserve.kvtransfer.transports.slot_buffers import SlotBuffers
from pdserve.kvtransfer.transports.torch_store import MEET_S, TorchStore, open_store, own_address, torch_distributed

logger = logging.getLogger(__name__)

BODY_TAG, ABORT_TAG = 1, 2
KEY_BYTES = 16
_SOURCE, _SINK = 0, 1


class _Pair:
    """One end of a process group of two."""

    def __init__(self, store: Any, key: str, rank: int, host: str) -> None:
        """Meet the other end, for at most MEET_S; `host` is where this end listens. Raises OSError."""
        distributed = torch_distributed()
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=MEET_S)
        try:
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
            self._group = distributed.ProcessGroupGloo(distributed.PrefixStore(key, store), rank, 2, options)
        except RuntimeError as error:
            raise OSError(f"the two ends did not meet: {error}") from error
        self._peer = 1 - rank
        self._is_aborted = False
        self._lock = threading.Lock()

    def send(self, body: torch.Tensor) -> Any:
        """Post a send; what is returned must live until its bytes have gone. Raises OSError."""
        return self._post("send", body)

    def receive(self, body: torch.Tensor, timeout_s: float) -> None:
        """Receive into `body`. Raises OSError if the pair is aborted or broken, or nothing comes."""
        work = self._post("recv", body)
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise OSError(f"the pair is broken: {error}") from error

    def abort(self) -> None:
        """End the operations, here and at the other end.

        A receive whose body is half here may outlive this, until its own time-out.
        """
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            logger.debug("the pair is closed: %s", error)

    def _post(self, name: str, body: torch.Tensor) -> Any:
        try:
            return getattr(self._group, name)([body], self._peer, BODY_TAG)
        except RuntimeError as error:
            raise OSError(f"the pair is broken: {error}") from error


def _tensor(slots: SlotBuffers, slot: int, num_bytes: int) -> torch.Tensor:
    """Return the first bytes of a slot as the library takes them."""
    return torch.frombuffer(slots.view(slot), dtype=torch.uint8)[:num_bytes]


class TorchDistSender:
    """The source's end."""

    carries_headers = False

    def __init__(self, store: TorchStore, host: str, *, slot_bytes: int) -> None:
        """Raises OSError if torch.distributed cannot be used here."""
        self._slots = SlotBuffers(slot_bytes)
        self._is_closed = False
        self._pair: _Pair | None = None
        self._error: OSError | None = None
        self._sent: dict[int, Any] = {}
        served, key = store.get(host), secrets.token_hex(KEY_BYTES)
        self.address = format_endpoint(host, store.port, key)
        # The other end cannot attach before this one waits for it.
        self._meeting = threading.Thread(target=self._meet, args=(served, key, host), name="torch_dist", daemon=True)
        self._meeting.start()

    def _meet(self, store: Any, key: str, host: str) -> None:
        try:
            self._pair = _Pair(store, key, _SOURCE, host)
        except OSError as error:
            self._error = error
        if self._is_closed and self._pair is not None:
            self._pair.abort()

    async def wait_attached(self, answer: str) -> None:
        """See SendTransport."""
        await asyncio.to_thread(self._meeting.join)
        if self._error is not None:
            raise self._error

    def buffer(self, slot: int) -> memoryview:
        """See SendTransport."""
        return self._slots.view(slot)

    def send(self, header: Chunk) -> None:
        """See SendTransport: posts the send. The one before it from the same slot has gone: it was credited."""
        if self._pair is None or self._is_closed:
            raise BrokenPipeError("the link is closed")
        self._sent[header.slot] = self._pair.send(_tensor(self._slots, header.slot, header.num_bytes))

    def progress(self) -> float | None:
        """See SendTransport: the library has threads of its own."""
        return None

    def trim(self, num_slots: int) -> None:
        """See SendTransport: only while nothing is on its way."""
        self._sent.clear()
        self._slots.trim(num_slots)

    def close(self) -> None:
        """See SendTransport."""
        self._is_closed = True
        if self._pair is not None:
            self._pair.abort()

    def free(self) -> None:
        """See SendTransport."""
        self._meeting.join()
        self._sent.clear()
        self._pair = None
        self._slots.trim(0)


class TorchDistReceiver:
    """The sink's end: a thread that receives the bodies whose headers came over the control channel."""

    answer = ""

    def __init__(
        self, address: str, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken, *, stall_s: float
    ) -> None:
        """A body that does not come within `stall_s` of its header breaks the link."""
        self._address = address
        self._stall_s = stall_s
        self._landing_slots = slots
        self._on_chunk = on_chunk
        self._on_broken = on_broken
        self._slots = SlotBuffers(slots.slot_bytes)
        self._pair: _Pair | None = None
        self._headers: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._receive, name="torch_dist link", daemon=True)

    async def attach(self) -> None:
        """See ReceiveTransport."""
        host, port, key = parse_endpoint("torch_dist", self._address)
        self._pair = await asyncio.to_thread(self._meet, host, port, key)
        self._thread.start()

    def _meet(self, host: str, port: int, key: str) -> _Pair:
        # The store would try for seconds to reach a port where nobody is. The pair's own end is at the address of this
        # machine that reaches the source.
        own_host = own_address(host, port)
        return _Pair(open_store(host, port), key, _SINK, own_host)

    def header_received(self, header: Chunk) -> None:
        """See ReceiveTransport: its bytes wait at the source."""
        self._landing_slots.occupy(header)
        self._headers.put(header)

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """See ReceiveTransport."""
        return self._slots.view(slot)[:num_bytes]

    def close(self) -> None:
        """See ReceiveTransport."""
        self._headers.put(None)
        if self._pair is not None:
            self._pair.abort()

    async def free(self) -> None:
        """See ReceiveTransport."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._pair = None
        self._slots.trim(0)

    def _receive(self) -> None:
        assert self._pair is not None, "the thread starts with it"
        try:
            while (header := self._headers.get()) is not None:
                self._pair.receive(_tensor(self._slots, header.slot, self._landing_slots.slot_bytes), self._stall_s)
                self._on_chunk(header)
        except OSError as error:
            self._on_broken(str(error))
        except Exception as error:
            # The barrier of this thread: its link ends, the process goes on (I13).
            logger.exception("a torch_dist link failed")
            self._on_broken(f"{type(error).__name__}: {error}")
