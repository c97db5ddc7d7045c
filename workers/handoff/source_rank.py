"""A rank's part of the source side: its links to decode workers, and what it ships over them.

Runs on the loop of the rank's process, which for rank 0 is the worker's. It carries out what rank 0 orders and reports
what happened; it decides nothing about a transfer (I9).
"""

import asyncio
import logging

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.rank_messages import (
    AddPair,
    DropExport,
    DropPair,
    HandoffOrder,
    LinkRelay,
    PairBroken,
    RankState,
    StepReleased,
)
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.kvtransfer.slots import SlotPool
from pdserve.workers.handoff.exports import RankExporter, Streams
from pdserve.workers.handoff.settings import TICK_S, RankSettings, Report
from pdserve.workers.handoff.sink_links import SinkLinks

logger = logging.getLogger(__name__)


class SourceRank:
    """See RankPort."""

    def __init__(self, settings: RankSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._slots = SlotPool(settings.config.max_slots)
        self._pairs: dict[int, SinkLinks] = {}
        self._tasks = BackgroundTasks("the source's links")
        self._watcher: asyncio.Task[None] | None = None
        self._reported = RankState(is_idle=True, num_lent_slots=0)
        self.exporter = RankExporter(settings.copier, self._streams_of, self._step_released)

    def start(self) -> None:
        """Begin to watch the links."""
        self._watcher = self._tasks.start(self._watch(), name="source links")

    async def stop(self) -> None:
        """Fence every link."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        if self._watcher is not None:
            self._watcher.cancel()
        await self._tasks.wait()

    @property
    def is_idle(self) -> bool:
        """See RankPort."""
        return self._num_held == 0

    @property
    def num_lent_slots(self) -> int:
        """See RankPort."""
        return self._slots.num_lent

    @property
    def _num_held(self) -> int:
        return sum(pair.num_outstanding for pair in self._pairs.values()) + len(self.exporter)

    def post(self, order: HandoffOrder) -> None:
        """See RankPort."""
        match order:
            case AddPair(pair_no=pair_no):
                self._pairs[pair_no] = SinkLinks(order, self._settings, self._slots, self._report, self._tasks)
            case DropPair(pair_no=pair_no):
                self._pairs.pop(pair_no).close()
            case LinkRelay():
                self._relay(order)
            case DropExport(transfer=transfer, last_end=last_end):
                self.exporter.drop(transfer, last_end)
                for pair in self._pairs.values():
                    pair.drop_void()
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for a source")

    def _relay(self, relay: LinkRelay) -> None:
        pair = self._pairs.get(relay.pair_no)
        if pair is None:
            return  # it was dropped meanwhile
        try:
            pair.message_received(relay.message)
        except ProtocolError as error:
            self._report(PairBroken(pair_no=relay.pair_no, reason=str(error)))

    def links_of(self, pair_no: int) -> SinkLinks:
        """Return the links of a pair; for tests."""
        return self._pairs[pair_no]

    def _streams_of(self, pair_no: int) -> Streams:
        # On the thread of the steps: one look-up.
        pair = self._pairs.get(pair_no)
        return {} if pair is None else pair.streams

    def _step_released(self, transfer: TransferId, end_token: int) -> None:
        # From any thread.
        self._loop.call_soon_threadsafe(self._report, StepReleased(transfer=transfer, end_token=end_token))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for pair in list(self._pairs.values()):
                for link in pair.links():
                    # One check that fails does not cost the others (I6).
                    self._tasks.guarded(pair.check, link)
            self._tasks.guarded(self._report_state)

    def _report_state(self) -> None:
        state = RankState(is_idle=self.is_idle, num_lent_slots=self._slots.num_lent)
        if state != self._reported:
            self._reported = state
            self._report(state)
