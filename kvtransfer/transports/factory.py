"""The transports of a worker: what its links are made of."""

import asyncio
from collections.abc import Callable

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.transfer_messages import LinkOffer
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.data_port import DataPort
from pdserve.kvtransfer.transports.nixl import NixlAgent, NixlReceiver, NixlSender
from pdserve.kvtransfer.transports.protocol import OnBroken, OnChunk, ReceiveTransport, SendTransport
from pdserve.kvtransfer.transports.shm import ShmReceiver, ShmSender
from pdserve.kvtransfer.transports.tcp import TcpReceiver, TcpSender
from pdserve.kvtransfer.transports.torch_dist import TorchDistReceiver, TorchDistSender
from pdserve.kvtransfer.transports.torch_store import TorchStore


class Transports:
    """Makes both ends of links, and holds what they share: the data port, the NIXL agent, the store."""

    def __init__(self, config: TransferConfig, token: bytes, is_receiving: Callable[[], bool]) -> None:
        """`is_receiving` is called from other threads: True while chunks are expected soon."""
        self._config = config
        self._token = token
        self._host = ""
        self.listener = DataPort(token)
        self._nixl = NixlAgent(config.nixl_backend, is_receiving)
        self._store = TorchStore()

    async def start(self, host: str, *, is_source: bool) -> None:
        """Listen for data connections, if links begin here; make ready what takes long to be made."""
        self._host = host
        if TransportKind.NIXL in self._config.transports:
            await asyncio.to_thread(self._nixl.prepare)
        if is_source:
            await self.listener.start(host)

    async def stop(self) -> None:
        """Release what links shared; they have ended before."""
        await self.listener.stop()
        await asyncio.to_thread(self._nixl.close)
        self._store.close()

    def wake(self) -> None:
        """Chunks are expected from now on."""
        self._nixl.wake()

    def make_sender(self, name: str, key: str) -> SendTransport:
        """Return the source's end of a link. `key` tells the links of this worker apart.

        Raises ProtocolError for a transport that is not configured, OSError if memory or the library cannot be had.
        """
        config = self._config
        if name not in list(config.transports):
            raise ProtocolError(f"transport {name!r} is not offered here")
        match TransportKind(name):
            case TransportKind.SHM:
                return ShmSender(slot_bytes=config.slot_bytes, num_slots=config.max_slots_per_link)
            case TransportKind.NIXL:
                return NixlSender(self._nixl, slot_bytes=config.slot_bytes, num_slots=config.max_slots_per_link)
            case TransportKind.TCP:
                return TcpSender(self.listener, key, slot_bytes=config.slot_bytes)
            case TransportKind.TORCH_DIST:
                return TorchDistSender(self._store, self._host, slot_bytes=config.slot_bytes)

    def make_receiver(
        self, kind: TransportKind, offer: LinkOffer, slots: LandingSlots, on_chunk: OnChunk, on_broken: OnBroken
    ) -> ReceiveTransport:
        """Return the sink's end of a link that was offered."""
        match kind:
            case TransportKind.SHM:
                return ShmReceiver(offer.address, slots, on_chunk)
            case TransportKind.NIXL:
                return NixlReceiver(self._nixl, slots, on_chunk, on_broken)
            case TransportKind.TCP:
                return TcpReceiver(offer.address, self._token, slots, on_chunk, on_broken)
            case TransportKind.TORCH_DIST:
                return TorchDistReceiver(offer.address, slots, on_chunk, on_broken, stall_s=self._config.stall_s)
