"""The prefill workers that a decode worker knows, and the landing threads that serve all their links."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk, TransferId
from pdserve.cluster.base.worker_info import WorkerInfo
from pdserve.workers.handoff.landings import Landings
from pdserve.workers.handoff.settings import HandoffSettings
from pdserve.workers.handoff.source_peer import PeerEvents, SourcePeer

logger = logging.getLogger(__name__)


class ChunkEvents(Protocol):
    """What becomes of a transfer's chunks; on the loop. The slot is returned after the call."""

    def chunk_scattered(self, header: Chunk) -> None:
        """A chunk is verified and in its blocks."""

    def chunk_dropped(self, header: Chunk) -> None:
        """Nobody wanted the chunk."""

    def chunk_refused(self, header: Chunk, reason: str) -> bool:
        """A chunk could not be verified; True if it should be sent again."""

    def unbound(self, transfer: TransferId) -> None:
        """Nothing writes the transfer's blocks any more."""


class SourcePeers:
    """Keeps a link to each announced prefill worker."""

    def __init__(
        self, settings: HandoffSettings, peer_events: PeerEvents, chunk_events: ChunkEvents, metrics: TransferMetrics
    ) -> None:
        self._settings = settings
        self._peer_events = peer_events
        self._chunk_events = chunk_events
        self._metrics = metrics
        self._peers: dict[tuple[WorkerId, Incarnation], SourcePeer] = {}
        self._leaving: set[SourcePeer] = set()
        self._link_numbers = count(1)
        self._tasks = BackgroundTasks("the prefill workers' links")
        self.landings = Landings(lambda: _LandingEvents(self), settings.layout.tp_size)

    def start(self) -> None:
        """Begin to land chunks."""
        self.landings.start()

    async def stop(self) -> None:
        """Disconnect from everyone and end the landing threads."""
        for key in list(self._peers):
            self._disconnect(key)
        await self._tasks.wait()
        await self.landings.stop()

    def announce(self, workers: Sequence[WorkerInfo]) -> list[SourcePeer]:
        """Keep a link to each of these, and to no other; return those that were dropped."""
        present = {(info.worker_id, info.incarnation): info for info in workers}
        dropped = [self._disconnect(key) for key in list(self._peers) if key not in present]
        for key, info in present.items():
            if key not in self._peers:
                self._peers[key] = SourcePeer(
                    info,
                    self._settings,
                    self.landings.threads,
                    self._peer_events,
                    self._metrics,
                    lambda: next(self._link_numbers),
                )
        return dropped

    def _disconnect(self, key: tuple[WorkerId, Incarnation]) -> SourcePeer:
        peer = self._peers.pop(key)
        logger.info("worker_id=%s left: its link closes", peer.info.worker_id)
        self._leaving.add(peer)
        self._tasks.start(self._leave(peer))
        return peer

    async def _leave(self, peer: SourcePeer) -> None:
        await peer.stop()
        self._leaving.discard(peer)

    def usable(self, worker_id: WorkerId) -> SourcePeer | None:
        """Return the peer of that name if its links can be used now."""
        return next((peer for (name, _), peer in self._peers.items() if name == worker_id and peer.is_usable), None)

    def all(self) -> list[SourcePeer]:
        """Return every peer that has not left."""
        return list(self._peers.values())

    @property
    def is_idle(self) -> bool:
        """True if no transfer is bound and no slot holds a chunk (I16)."""
        return self.landings.num_bindings == 0 and not any(peer.num_occupied_slots for peer in self._peers.values())

    # From the landing threads, on the loop.

    def chunk_scattered(self, header: Chunk) -> None:
        """Credit the chunk, then tell."""
        self._settle(header, None)
        for peer in self._peers.values():
            peer.count_bytes(header)
        self._chunk_events.chunk_scattered(header)

    def chunk_dropped(self, header: Chunk) -> None:
        """Credit the chunk, then tell."""
        self._settle(header, None)
        self._chunk_events.chunk_dropped(header)

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        """Ask whether the chunk should come again: NACK it, or credit it."""
        self._settle(header, reason if self._chunk_events.chunk_refused(header, reason) else None)

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        """A link's test pattern has come."""
        for peer in list(self._peers.values()):
            peer.test_verified(header, is_right=is_right)

    def unbound(self, transfer: TransferId) -> None:
        """A rank has answered; with the last answer nothing writes the transfer's blocks any more."""
        if self.landings.answered(transfer):
            self._chunk_events.unbound(transfer)

    def link_fenced(self, link_no: int) -> None:
        """Nothing reads the link's slots any more."""
        for peer in (*self._peers.values(), *self._leaving):
            peer.link_fenced(link_no)

    def _settle(self, header: Chunk, nack_reason: str | None) -> None:
        for peer in self._peers.values():
            peer.settle(header, nack_reason)


class _LandingEvents:
    """Hands a landing thread's events to the loop."""

    def __init__(self, peers: SourcePeers) -> None:
        self._peers = peers
        self._loop = asyncio.get_running_loop()

    def chunk_scattered(self, header: Chunk) -> None:
        self._loop.call_soon_threadsafe(self._peers.chunk_scattered, header)

    def chunk_dropped(self, header: Chunk) -> None:
        self._loop.call_soon_threadsafe(self._peers.chunk_dropped, header)

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._peers.chunk_refused, header, reason)

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        self._loop.call_soon_threadsafe(self._peers.test_verified, header, is_right)

    def unbound(self, transfer: TransferId) -> None:
        self._loop.call_soon_threadsafe(self._peers.unbound, transfer)

    def link_fenced(self, link_no: int) -> None:
        self._loop.call_soon_threadsafe(self._peers.link_fenced, link_no)
