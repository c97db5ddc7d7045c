"""The landing threads of a worker's ranks: a transfer is bound on all of them, and unbound when all have answered.

Rank 0 decides; a rank copies, and reports (I9).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.kvtransfer.landing import LandingEvents, LandingThread, ScatterTarget

logger = logging.getLogger(__name__)

STOP_S = 5.0


class Landings:
    """One landing thread for each rank."""

    def __init__(self, make_events: Callable[[], LandingEvents], num_ranks: int) -> None:
        self.threads = [LandingThread(make_events()) for _ in range(num_ranks)]
        self._unanswered: dict[TransferId, int] = {}

    @property
    def num_bindings(self) -> int:
        """Transfers expected or bound on some rank."""
        return max(thread.num_bindings for thread in self.threads)

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    async def stop(self) -> None:
        """End the threads after what was asked for."""
        ended = await asyncio.gather(*(asyncio.to_thread(thread.stop, STOP_S) for thread in self.threads))
        if not all(ended):
            logger.error("a landing thread did not end within %g s", STOP_S)

    def expect(self, transfer: TransferId) -> None:
        """Chunks of this transfer may come; they wait for `bind`."""
        for thread in self.threads:
            thread.expect(transfer)

    def bind(self, transfer: TransferId, targets: Sequence[ScatterTarget]) -> None:
        """Scatter the transfer's chunks into the rank's target."""
        for thread, target in zip(self.threads, targets, strict=True):
            thread.bind(transfer, target)

    def unbind(self, transfer: TransferId) -> None:
        """Drop the transfer's chunks from now on, on every rank; each answers, see `answered`. May be repeated."""
        self._unanswered[transfer] = self._unanswered.get(transfer, 0) + len(self.threads)
        for thread in self.threads:
            thread.unbind(transfer)

    def answered(self, transfer: TransferId) -> bool:
        """A rank has answered; True if it was the last one: nobody writes the transfer's blocks any more."""
        self._unanswered[transfer] -= 1
        if self._unanswered[transfer]:
            return False
        del self._unanswered[transfer]
        return True
