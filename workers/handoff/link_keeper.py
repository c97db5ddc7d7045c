"""One stream of a pair at its sink: keeps a link open for it, over the best transport that works.

Opens by itself, and again after a loss: at once over the next transport, or after a pause over one that has just
failed. What the source has in its slots, and what it gathers meanwhile, goes over the next link. A better transport
that has rested is tried beside the link that works, and takes its place once it has passed its test.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.rank_messages import LinkMessage, RankCounter
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk, CloseLink, Credit, LinkAttached, LinkOffer, Nack, OpenLink
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.transport_order import TransportOrder
from pdserve.workers.handoff.incoming_link import IncomingLink
from pdserve.workers.handoff.settings import RankSettings

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0


class LinkPair(Protocol):
    """The pair that a link belongs to."""

    @property
    def worker_id(self) -> WorkerId:
        """The source."""

    @property
    def incarnation(self) -> Incarnation:
        """The source's life."""

    @property
    def is_connected(self) -> bool:
        """True while there is a channel to the source."""

    def post(self, message: LinkMessage) -> None:
        """Send a message to the source."""

    def count(self, counter: RankCounter) -> None:
        """Something happened once more."""

    def link_changed(self, keeper: "LinkKeeper") -> None:
        """The link may be another one, or in another state."""

    def link_lost(self, stream_no: int, reason: str) -> None:
        """A link that was in use has broken; the next one is on its way."""

    def no_link_left(self, reason: str) -> None:
        """No transport opens a link now; the first one is tried again after a pause."""


class LinkKeeper:
    """The links of one stream, one after the other.

    Attributes:
        link: the one that carries the stream, or will.
    """

    def __init__(
        self,
        stream_no: int,
        pair: LinkPair,
        landing: LandingThread,
        settings: RankSettings,
        tasks: BackgroundTasks,
        draw_link_no: Callable[[], int],
    ) -> None:
        self.stream_no = stream_no
        self.link: IncomingLink | None = None
        self._candidate: IncomingLink | None = None
        self._pair = pair
        self._landing = landing
        self._settings = settings
        self._draw_link_no = draw_link_no
        self._loop = asyncio.get_running_loop()
        self._order = TransportOrder(settings.config.transports, settings.clock)
        self._fencing: dict[int, IncomingLink] = {}
        self._retry_s = RETRY_MIN_S
        self._retry: asyncio.TimerHandle | None = None
        self._tasks = tasks

    @property
    def is_open(self) -> bool:
        """True if transfers can use the link."""
        return self.link is not None and self.link.life.is_usable

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a chunk not yet credited."""
        return sum(link.num_occupied for link in (self.link, self._candidate) if link is not None)

    @property
    def is_fencing(self) -> bool:
        """True while the landing thread may still use a link."""
        return bool(self._fencing)

    def open(self) -> None:
        """Ask the source for a link."""
        if self._pair.is_connected and self.link is None:
            self.link = self._ask(self._order.choose())
            self._pair.link_changed(self)

    def prefer_better(self) -> None:
        """Nothing uses the link: try a better transport that has rested, beside it."""
        if self.link is None or not self.is_open or self._candidate is not None:
            return
        best = self._order.choose()
        if self._order.is_better(best, self.link.transport):
            self._candidate = self._ask(best)

    def close(self, reason: str) -> None:
        """The channel, or the pair, has gone: fence the links, open no other."""
        if self._retry is not None:
            self._retry.cancel()
        for link in self._drop_all():
            self._fence(link, reason, tells_source=False)

    def _drop_all(self) -> list[IncomingLink]:
        links = [link for link in (self.link, self._candidate) if link is not None]
        self.link = self._candidate = None
        return links

    def _ask(self, transport: TransportKind) -> IncomingLink:
        link = IncomingLink(self._draw_link_no(), self.stream_no, transport, self._pair.incarnation, self._landing)
        self._loop.call_later(OPEN_TIMEOUT_S, self._give_up_unless_open, link)
        self._pair.post(OpenLink(link_no=link.link_no, stream_no=self.stream_no, transport=transport.value))
        return link

    def _give_up_unless_open(self, link: IncomingLink) -> None:
        if link.life.state in (LinkState.OPENING, LinkState.TESTING):
            self._give_up(link, "it did not open in time")

    def _find(self, link_no: int) -> IncomingLink | None:
        return next(
            (link for link in (self.link, self._candidate) if link is not None and link.link_no == link_no), None
        )

    def has_link(self, link_no: int) -> bool:
        """True if the link is one of the present ones."""
        return self._find(link_no) is not None

    # From the source.

    def message_received(self, message: LinkMessage) -> None:
        """Take what the source says about one of the links: an offer, its end, or a chunk's header."""
        link = self._find(message.link_no)
        if link is None:
            return
        match message:
            case LinkOffer():
                self._tasks.start(self._attach(link, message))
            case CloseLink(reason=reason, is_temporary=is_temporary):
                self._give_up(link, reason, tells_source=False, is_temporary=is_temporary)
            case Chunk():
                self._header_received(link, message)
            case _:
                self._give_up(link, f"unexpected {type(message).__name__} from a source")

    def _header_received(self, link: IncomingLink, header: Chunk) -> None:
        """A chunk header came over the channel. One that breaks the protocol costs the link."""
        try:
            link.header_received(header)
        except ProtocolError as error:
            self._give_up(link, str(error))

    async def _attach(self, link: IncomingLink, offer: LinkOffer) -> None:
        def broken(reason: str) -> None:
            self._loop.call_soon_threadsafe(self._give_up, link, reason)

        try:
            answer = await link.attach(offer, self._settings, broken)
        except (OSError, ProtocolError) as error:
            self._give_up(link, str(error))
            return
        if link in (self.link, self._candidate):
            self._pair.link_changed(self)
            self._pair.post(LinkAttached(link_no=link.link_no, stream_no=self.stream_no, answer=answer))

    # From the landing thread, on the loop.

    def test_verified(self, header: Chunk, *, is_right: bool) -> None:
        """The test pattern came through, or did not."""
        link = self._find(header.link_no)
        if link is None:
            return
        link.vacate(header.slot)
        if not is_right:
            self._give_up(link, "the test pattern came through wrong")
            return
        was_usable = link.life.is_usable
        link.life.apply(LinkEvent.TESTED)
        self._credit(link, header)
        if not was_usable:
            self._opened(link)
        self._pair.link_changed(self)

    def _opened(self, link: IncomingLink) -> None:
        self._retry_s = RETRY_MIN_S
        self._order.opened(link.transport)
        logger.info("worker_id=%s link over %s is open", self._pair.worker_id, link.transport)
        if link is self._candidate:
            former, self.link, self._candidate = self.link, link, None
            if former is not None:
                self._fence(former, f"{link.transport} has taken its place", tells_source=True)

    def settle(self, header: Chunk, nack_reason: str | None) -> None:
        """Return a chunk's slot to the source: with CREDIT, or with NACK and why."""
        link = self._find(header.link_no)
        if link is None:
            return  # its link is gone, and the slot with it
        link.vacate(header.slot)
        if nack_reason is None:
            self._credit(link, header)
            return
        self._pair.post(
            Nack(
                link_no=link.link_no,
                stream_no=self.stream_no,
                seq=header.seq,
                slot=header.slot,
                reason=nack_reason,
            )
        )

    def _credit(self, link: IncomingLink, header: Chunk) -> None:
        self._pair.post(Credit(link_no=link.link_no, stream_no=self.stream_no, seq=header.seq, slot=header.slot))

    def link_fenced(self, link_no: int) -> None:
        """The landing thread is done with a link."""
        link = self._fencing.pop(link_no, None)
        if link is not None:
            link.fenced()

    # The end of a link.

    def _give_up(
        self, link: IncomingLink, reason: str, *, tells_source: bool = True, is_temporary: bool = False
    ) -> None:
        """Close a link; if it was to carry the stream, open another one."""
        if link not in (self.link, self._candidate):
            return
        was_refused = link.life.state in (LinkState.OPENING, LinkState.TESTING) and not is_temporary
        if was_refused:
            self._order.refused(link.transport)
        is_demoted = was_refused or (not is_temporary and self._order.broke(link.transport))
        if is_demoted:
            self._pair.count(RankCounter.DEMOTIONS)
        logger.warning("worker_id=%s link over %s: %s", self._pair.worker_id, link.transport, reason)
        was_usable = link.life.is_usable
        if link is self._candidate:
            self._candidate = None
            self._fence(link, reason, tells_source=tells_source)
            return
        self.link = None
        self._fence(link, reason, tells_source=tells_source)
        self._pair.link_changed(self)
        if was_usable:
            self._pair.link_lost(self.stream_no, reason)
        self._open_again(reason, was_refused=was_refused, is_temporary=is_temporary)

    def _open_again(self, reason: str, *, was_refused: bool, is_temporary: bool) -> None:
        if self._candidate is not None:
            self.link, self._candidate = self._candidate, None
            self._pair.link_changed(self)
            return
        if not (is_temporary or self._order.are_all_resting):
            self.open()
            return
        if was_refused:
            self._pair.no_link_left(reason)
        self._retry = self._loop.call_later(self._retry_s, self.open)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _fence(self, link: IncomingLink, reason: str, *, tells_source: bool) -> None:
        if tells_source:
            self._pair.post(CloseLink(link_no=link.link_no, stream_no=self.stream_no, reason=reason))
        self._pair.count(RankCounter.FENCES)
        self._fencing[link.link_no] = link
        link.break_off()
        self._tasks.start(link.fence())
