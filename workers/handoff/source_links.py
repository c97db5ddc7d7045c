"""A prefill worker as a rank of a decode worker sees it: a link for each stream of the pair that ends at this rank."""

from collections.abc import Callable

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.rank_messages import (
    AddPair,
    LinkLost,
    LinkMessage,
    LinkRelay,
    LinkReport,
    NoLinkLeft,
    RankCount,
    RankCounter,
)
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.layout import plan_streams
from pdserve.workers.handoff.link_keeper import LinkKeeper
from pdserve.workers.handoff.settings import RankSettings, Report


class SourceLinks:
    """One pair at one rank of its sink. See LinkPair.

    Attributes:
        streams: all of the pair, in order.
    """

    def __init__(
        self,
        pair: AddPair,
        settings: RankSettings,
        landing: LandingThread,
        report: Report,
        tasks: BackgroundTasks,
        draw_link_no: Callable[[], int],
    ) -> None:
        self._pair = pair
        self._report = report
        self._is_connected = True
        self._reported: dict[int, LinkReport] = {}
        self.streams = plan_streams(pair.kv, settings.layout)
        self._keepers = {
            number: LinkKeeper(number, self, landing, settings, tasks, draw_link_no)
            for number, stream in enumerate(self.streams)
            if stream.sink_rank == settings.rank
        }
        for keeper in self._keepers.values():
            keeper.open()

    @property
    def worker_id(self) -> WorkerId:
        """See LinkPair."""
        return self._pair.worker_id

    @property
    def incarnation(self) -> Incarnation:
        """See LinkPair."""
        return self._pair.incarnation

    @property
    def is_connected(self) -> bool:
        """See LinkPair."""
        return self._is_connected

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a chunk not yet credited."""
        return sum(keeper.num_occupied_slots for keeper in self._keepers.values())

    @property
    def is_fencing(self) -> bool:
        """True while the landing thread may still use a link."""
        return any(keeper.is_fencing for keeper in self._keepers.values())

    @property
    def keepers(self) -> list[LinkKeeper]:
        """Return the links' keepers."""
        return list(self._keepers.values())

    def message_received(self, message: LinkMessage) -> None:
        """Take what the source says about a link."""
        keeper = self._keepers.get(message.stream_no)
        if keeper is not None:
            keeper.message_received(message)

    def keeper_of(self, header: Chunk) -> LinkKeeper | None:
        """Return the keeper of the stream of a chunk that has landed, if its link is still in use."""
        keeper = self._keepers.get(header.stream_no)
        return keeper if keeper is not None and keeper.has_link(header.link_no) else None

    def link_fenced(self, link_no: int) -> None:
        """The landing thread is done with a link."""
        for keeper in self._keepers.values():
            keeper.link_fenced(link_no)

    def close(self, reason: str) -> None:
        """The source is gone: fence the links."""
        self._is_connected = False
        for keeper in self._keepers.values():
            keeper.close(reason)

    # See LinkPair.

    def post(self, message: LinkMessage) -> None:
        """Send a message to the source."""
        self._report(LinkRelay(pair_no=self._pair.pair_no, message=message))

    def count(self, counter: RankCounter) -> None:
        """Something happened once more."""
        self._report(RankCount(counter=counter))

    def link_changed(self, keeper: LinkKeeper) -> None:
        """Say what the link of a stream is now, if it is another thing than before."""
        link = keeper.link
        report = LinkReport(
            pair_no=self._pair.pair_no,
            stream_no=keeper.stream_no,
            link_no=0 if link is None else link.link_no,
            is_usable=keeper.is_open,
            transport="" if link is None else link.transport.value,
            state="connecting" if link is None else link.life.state.value,
        )
        if self._is_connected and self._reported.get(keeper.stream_no) != report:
            self._reported[keeper.stream_no] = report
            self._report(report)

    def link_lost(self, stream_no: int, reason: str) -> None:
        """A link that was in use has broken; the next one is on its way."""
        self._report(LinkLost(pair_no=self._pair.pair_no, stream_no=stream_no, reason=reason))

    def no_link_left(self, reason: str) -> None:
        """No transport opens a link now."""
        self._report(NoLinkLeft(pair_no=self._pair.pair_no, reason=reason))
