"""The prefill workers that a decode worker knows."""

import logging
from collections.abc import Sequence
from itertools import count

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.worker_info import WorkerInfo
from pdserve.workers.handoff.settings import HandoffSettings, RankPort
from pdserve.workers.handoff.source_peer import PeerEvents, SourcePeer

logger = logging.getLogger(__name__)


class SourcePeers:
    """Keeps a channel to each announced prefill worker."""

    def __init__(self, settings: HandoffSettings, ranks: Sequence[RankPort], peer_events: PeerEvents) -> None:
        self._settings = settings
        self._ranks = ranks
        self._peer_events = peer_events
        self._peers: dict[tuple[WorkerId, Incarnation], SourcePeer] = {}
        self._pair_numbers = count(1)
        self._tasks = BackgroundTasks("the prefill workers' channels")

    async def stop(self) -> None:
        """Disconnect from everyone."""
        for key in list(self._peers):
            self._disconnect(key)
        await self._tasks.wait()

    def announce(self, workers: Sequence[WorkerInfo]) -> list[SourcePeer]:
        """Keep a channel to each of these, and to no other; return those that were dropped."""
        present = {(info.worker_id, info.incarnation): info for info in workers}
        dropped = [self._disconnect(key) for key in list(self._peers) if key not in present]
        for key, info in present.items():
            if key not in self._peers:
                self._peers[key] = SourcePeer(
                    info, self._settings, self._ranks, self._peer_events, lambda: next(self._pair_numbers)
                )
        return dropped

    def _disconnect(self, key: tuple[WorkerId, Incarnation]) -> SourcePeer:
        peer = self._peers.pop(key)
        logger.info("worker_id=%s left: its links close", peer.info.worker_id)
        self._tasks.start(peer.stop())
        return peer

    def usable(self, worker_id: WorkerId) -> SourcePeer | None:
        """Return the peer of that name if its links can be used now."""
        return next((peer for (name, _), peer in self._peers.items() if name == worker_id and peer.is_usable), None)

    def of_pair(self, pair_no: int) -> SourcePeer | None:
        """Return the peer whose present channel has that number."""
        return next((peer for peer in self._peers.values() if peer.pair_no == pair_no), None)

    def all(self) -> list[SourcePeer]:
        """Return every peer that has not left."""
        return list(self._peers.values())
