"""One stream of a pair at its sink: keeps a link open for it, over the best transport that works.

Opens by itself, and again after a loss: at once over the next transport, or after a pause over one that has just
failed. What the source has in its slots, and what it gathers meanwhile, goes over the next link.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk, CloseLink, Credit, LinkAttached, LinkOffer, Nack, OpenLink
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.transport_order import TransportOrder
from pdserve.workers.handoff.incoming_link import IncomingLink
from pdserve.workers.handoff.settings import HandoffSettings

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
    def is_connected(self) -> bool:
        """True while there is a channel to the source."""

    def post(self, message: Message) -> None:
        """Send a message to the source."""

    def link_lost(self, reason: str) -> None:
        """A link that was in use has broken; the next one is on its way."""

    def no_link_left(self, reason: str) -> None:
        """No transport opens a link now; the first one is tried again after a pause."""


class LinkKeeper:
    """The links of one stream, one after the other."""

    def __init__(
        self,
        stream_no: int,
        pair: LinkPair,
        landing: LandingThread,
        settings: HandoffSettings,
        metrics: TransferMetrics,
        tasks: BackgroundTasks,
        draw_link_no: Callable[[], int],
    ) -> None:
        self.stream_no = stream_no
        self.link: IncomingLink | None = None
        self._pair = pair
        self._landing = landing
        self._settings = settings
        self._metrics = metrics
        self._draw_link_no = draw_link_no
        self._loop = asyncio.get_running_loop()
        self._order = TransportOrder(settings.config.transports, settings.clock)
        self._fencing: dict[int, IncomingLink] = {}
        self._retry_s = RETRY_MIN_S
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = tasks

    @property
    def is_open(self) -> bool:
        """True if transfers can use the link."""
        return self.link is not None and self.link.life.is_usable

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a chunk not yet credited."""
        return 0 if self.link is None else self.link.num_occupied

    def open(self) -> None:
        """Ask the source for a link."""
        if not self._pair.is_connected or self.link is not None:
            return
        link = IncomingLink(self._draw_link_no(), self.stream_no, self._order.choose(), self._landing)
        self.link = link
        self._set_timer(OPEN_TIMEOUT_S, self._give_up, link, "it did not open in time")
        self._pair.post(OpenLink(link_no=link.link_no, stream_no=self.stream_no, transport=link.transport.value))

    def close(self, reason: str) -> None:
        """The channel, or the pair, has gone: fence the link, open no other."""
        self._cancel_timer()
        self._drop(reason, tells_source=False)

    @property
    def is_fencing(self) -> bool:
        """True while the landing thread may still use a link."""
        return bool(self._fencing)

    def prefer_better(self) -> None:
        """Nothing uses the link: change to a better transport that has rested."""
        link = self.link
        if link is None or not link.life.is_usable:
            return
        best = self._order.choose()
        if self._order.is_better(best, link.transport):
            logger.info("worker_id=%s link over %s makes way for %s", self._pair.worker_id, link.transport, best)
            self._drop(f"{best} is tried again", tells_source=True)
            self.open()

    # From the source.

    def offered(self, offer: LinkOffer) -> None:
        """The source offers the link that was asked for."""
        if self.link is not None and self.link.link_no == offer.link_no:
            self._tasks.start(self._attach(self.link, offer))

    def closed_by_source(self, message: CloseLink) -> None:
        """The source has closed the link, or has none."""
        if self.link is not None and self.link.link_no == message.link_no:
            self._give_up(self.link, message.reason, tells_source=False)

    def header_received(self, header: Chunk) -> None:
        """A chunk header came over the channel. One that breaks the protocol costs the link."""
        link = self.link
        if link is None or link.link_no != header.link_no:
            return
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
        if link is self.link:
            self._pair.post(LinkAttached(link_no=link.link_no, answer=answer))

    # From the landing thread, on the loop.

    def test_verified(self, header: Chunk, *, is_right: bool) -> None:
        """The test pattern came through, or did not."""
        link = self.link
        if link is None or link.link_no != header.link_no:
            return
        link.vacate(header.slot)
        if not is_right:
            self._give_up(link, "the test pattern came through wrong")
            return
        was_usable = link.life.is_usable
        link.life.apply(LinkEvent.TESTED)
        self._pair.post(Credit(link_no=link.link_no, seq=header.seq, slot=header.slot))
        if not was_usable:
            self._cancel_timer()
            self._retry_s = RETRY_MIN_S
            self._order.opened(link.transport)
            logger.info("worker_id=%s link over %s is open", self._pair.worker_id, link.transport)

    def settle(self, header: Chunk, nack_reason: str | None) -> None:
        """Return a chunk's slot to the source: with CREDIT, or with NACK and why."""
        link = self.link
        if link is None or link.link_no != header.link_no:
            return  # its link is gone, and the slot with it
        link.vacate(header.slot)
        if nack_reason is None:
            self._pair.post(Credit(link_no=link.link_no, seq=header.seq, slot=header.slot))
        else:
            self._pair.post(Nack(link_no=link.link_no, seq=header.seq, slot=header.slot, reason=nack_reason))

    def count_bytes(self, header: Chunk) -> None:
        """Count a verified chunk for status."""
        if self.link is not None and self.link.link_no == header.link_no:
            self.link.num_bytes += header.num_bytes

    def link_fenced(self, link_no: int) -> None:
        """The landing thread is done with a link."""
        link = self._fencing.pop(link_no, None)
        if link is not None:
            link.fenced()

    # The end of a link.

    def _give_up(self, link: IncomingLink, reason: str, *, tells_source: bool = True) -> None:
        """Close the link and open another one, after a pause if every transport has just failed."""
        if link is not self.link:
            return
        self._cancel_timer()
        was_refused = link.life.state in (LinkState.OPENING, LinkState.TESTING)
        if was_refused:
            self._order.refused(link.transport)
            is_demoted = True
        else:
            is_demoted = self._order.broke(link.transport)
        if is_demoted:
            self._metrics.demotions.inc()
        logger.warning("worker_id=%s link over %s: %s", self._pair.worker_id, link.transport, reason)
        self._drop(reason, tells_source=tells_source)
        if not self._order.is_everyone_resting:
            self.open()
            return
        if was_refused:
            self._pair.no_link_left(reason)
        self._set_timer(self._retry_s, self.open)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _drop(self, reason: str, *, tells_source: bool) -> None:
        link, self.link = self.link, None
        if link is None:
            return
        was_usable = link.life.is_usable
        if tells_source:
            self._pair.post(CloseLink(link_no=link.link_no, reason=reason))
        self._metrics.fences.inc()
        self._fencing[link.link_no] = link
        link.break_off()
        self._tasks.start(link.fence())
        if was_usable:
            self._pair.link_lost(reason)

    def _set_timer(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(delay_s, act, *arguments)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
