"""What the hand-off services of a worker, and of each of its ranks, need to know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.rank_messages import HandoffOrder, HandoffReport
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.kvtransfer.transports.factory import Transports
from pdserve.workers.kv.copy import Copier

TICK_S = 0.25
PROGRESS_S = 1.0
GIVE_BACK_S = 1.0
"""A link that was idle this long returns what it borrowed. At once would cost page faults with each burst."""
TEST_BYTES = 64 << 10
MAX_FAILOVERS = 2
"""A transfer that loses more links of one stream than this ends: its KV may be what breaks them."""

Report = Callable[[HandoffReport], None]
"""Tells rank 0; on the loop."""


class RankPort(Protocol):
    """A rank's part of the hand-off, as rank 0 sees it: in its own process or in another one."""

    def post(self, order: HandoffOrder) -> None:
        """Tell the rank; orders arrive in order. One that has gone is reported by itself."""

    @property
    def is_idle(self) -> bool:
        """True if the rank holds nothing of any transfer, as far as it is known here."""

    @property
    def num_lent_slots(self) -> int:
        """Slots that the rank's outgoing links hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """One rank: its KV, and what its links are made of."""

    rank: int
    incarnation: Incarnation
    """The worker's."""
    config: TransferConfig
    copier: Copier
    clock: Clock
    transports: Transports

    @property
    def layout(self) -> KVLayout:
        """The layout of the worker's KV."""
        return self.copier.layout

    @property
    def test_bytes(self) -> int:
        """Length of a link's test pattern."""
        return min(TEST_BYTES, self.config.slot_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """The worker: its identity, and the transfer section of the configuration."""

    worker_id: WorkerId
    incarnation: Incarnation
    numerics_digest: str
    config: TransferConfig
    channel: ChannelSettings
    layout: KVLayout
    clock: Clock
