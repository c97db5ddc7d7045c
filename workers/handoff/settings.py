"""What the hand-off services of a worker need to know."""

from dataclasses import dataclass

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.kvtransfer.transports.factory import Transports
from pdserve.workers.kv.copy import BlockCopier

TICK_S = 0.25
PROGRESS_S = 1.0
GIVE_BACK_S = 1.0
"""A link that was idle this long returns what it borrowed. At once would cost page faults with each burst."""
TEST_BYTES = 64 << 10
MAX_FAILOVERS = 2
"""A transfer that loses more links of one stream than this ends: its KV may be what breaks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """Identity of the worker, and the transfer section of the configuration."""

    worker_id: WorkerId
    incarnation: Incarnation
    numerics_digest: str
    config: TransferConfig
    channel: ChannelSettings
    copiers: tuple[BlockCopier, ...]
    """One for each rank."""
    clock: Clock
    transports: Transports

    @property
    def layout(self) -> KVLayout:
        """The layout of the worker's KV."""
        return self.copiers[0].layout

    @property
    def test_bytes(self) -> int:
        """Length of a link's test pattern."""
        return min(TEST_BYTES, self.config.slot_bytes)
