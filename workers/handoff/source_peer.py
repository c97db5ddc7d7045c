"""A prefill worker as a decode worker sees it: the channel to it, and the link over which its KV arrives.

Opens by itself and again after a loss: HELLO, then the first transport of the configuration whose test pattern comes
through. A pair whose layouts differ stays refused, with the field, for as long as both live.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import (
    Chunk,
    CloseLink,
    Credit,
    Hello,
    HelloOk,
    LinkAttached,
    LinkOffer,
    Nack,
    OpenLink,
    Refuse,
)
from pdserve.cluster.base.wire import Channel, ChannelClient
from pdserve.cluster.base.worker_info import Endpoint, LinkView, WorkerInfo
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.workers.handoff.incoming_link import IncomingLink
from pdserve.workers.handoff.settings import HandoffSettings

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0
DEMOTION_FAILURES, DEMOTION_WINDOW_S = 3, 60.0
"""A transport whose link worked and broke this often within the window makes way for the next one."""


class PeerEvents(Protocol):
    """What a peer tells the sink service; on the loop."""

    def link_lost(self, peer: "SourcePeer", reason: str) -> None:
        """Transfers over the link are over; its channel may still live."""

    def transfer_message(self, peer: "SourcePeer", message: Message) -> None:
        """A message about a transfer. Raises ProtocolError for what cannot be."""


class SourcePeer:
    """One life of a prefill worker."""

    def __init__(
        self,
        info: WorkerInfo,
        settings: HandoffSettings,
        landing: LandingThread,
        events: PeerEvents,
        metrics: TransferMetrics,
        draw_link_no: Callable[[], int],
    ) -> None:
        self.info = info
        self.note = ""
        self._settings = settings
        self._landing = landing
        self._events = events
        self._metrics = metrics
        self._draw_link_no = draw_link_no
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._link: IncomingLink | None = None
        self._fencing: dict[int, IncomingLink] = {}
        self._next_transport = 0
        self._retry_s = RETRY_MIN_S
        self._failure_times: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(f"the link to {info.worker_id}")

        async def resolve() -> Endpoint:
            return info.endpoint

        self._client = ChannelClient(settings.channel, self, resolve, name=info.worker_id)
        self._client.start()

    async def stop(self) -> None:
        """Disconnect; the link is fenced."""
        await self._client.stop()
        await self._tasks.wait()

    @property
    def link(self) -> IncomingLink | None:
        """The link, if transfers can use it now."""
        return self._link if self._link is not None and self._link.life.is_usable else None

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a chunk not yet credited."""
        return 0 if self._link is None else self._link.num_occupied

    def view(self, num_transfers: int) -> LinkView:
        """Return what status shows."""
        link = self._link
        return LinkView(
            peer=self.info.worker_id,
            transport="" if link is None else link.transport.value,
            state="connecting" if link is None else link.life.state.value,
            num_transfers=num_transfers,
            num_bytes=0 if link is None else link.num_bytes,
            note=self.note,
        )

    def post(self, message: Message) -> None:
        """Send a message; lost if the channel has gone, which is reported by itself."""
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            logger.debug("worker_id=%s a message could not be posted: %s", self.info.worker_id, error)

    # The channel.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
        self._next_transport = 0
        settings = self._settings
        channel.post(
            Hello(
                worker_id=settings.worker_id,
                incarnation=settings.incarnation,
                kv=settings.layout,
                numerics_digest=settings.numerics_digest,
            )
        )

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        self._channel = None
        self._cancel_timer()
        self._drop_link(f"worker {self.info.worker_id} was lost: {reason}", tell_source=False)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler. A source that breaks the protocol loses its channel."""
        try:
            match message:
                case HelloOk():
                    self._welcomed(message)
                case Refuse(reason=reason):
                    self.note = f"refused: {reason}"
                    logger.warning("worker_id=%s refuses this worker: %s", self.info.worker_id, reason)
                case LinkOffer(link_no=link_no):
                    if self._link is not None and self._link.link_no == link_no:
                        self._tasks.start(self._attach(self._link, message))
                case CloseLink(link_no=link_no, reason=reason):
                    if self._link is not None and self._link.link_no == link_no:
                        self._give_up(self._link, reason, tell_source=False)
                case Chunk(link_no=link_no):
                    if self._link is not None and self._link.link_no == link_no:
                        self._link.header_received(message)
                case _:
                    self._events.transfer_message(self, message)
        except ProtocolError as error:
            logger.warning("worker_id=%s broke the hand-off protocol: %s", self.info.worker_id, error)
            channel.close(f"protocol error: {error}")

    def _welcomed(self, message: HelloOk) -> None:
        if self._link is not None:
            raise ProtocolError("HELLO was answered twice")
        difference = self._settings.layout.difference(message.kv)
        if message.incarnation != self.info.incarnation:
            difference = f"incarnation: {self.info.incarnation!r} announced, {message.incarnation!r} there"
        if difference is not None:
            self.note = f"refused: {difference}"
            logger.warning("worker_id=%s does not fit: %s", self.info.worker_id, difference)
            return
        is_same = message.numerics_digest == self._settings.numerics_digest
        self.note = "" if is_same else "tolerance class: numerics digests differ"
        self._open()

    # The link.

    def _open(self) -> None:
        transports = self._settings.config.transports
        transport = transports[self._next_transport % len(transports)]
        self._link = IncomingLink(self._draw_link_no(), transport, self._landing)
        self._set_timer(OPEN_TIMEOUT_S, self._give_up, self._link, "it did not open in time")
        self.post(OpenLink(link_no=self._link.link_no, transport=transport.value))

    async def _attach(self, link: IncomingLink, offer: LinkOffer) -> None:
        def broken(reason: str) -> None:
            self._loop.call_soon_threadsafe(self._give_up, link, reason)

        try:
            answer = await link.attach(offer, self._settings, broken)
        except (OSError, ProtocolError) as error:
            self._give_up(link, str(error))
            return
        if link is self._link:
            self.post(LinkAttached(link_no=link.link_no, answer=answer))

    def test_verified(self, header: Chunk, *, is_right: bool) -> None:
        """The test pattern came through, or did not."""
        link = self._link
        if link is None or link.link_no != header.link_no:
            return
        link.vacate(header.slot)
        if not is_right:
            self._give_up(link, "the test pattern came through wrong")
            return
        was_usable = link.life.is_usable
        link.life.apply(LinkEvent.TESTED)
        self.post(Credit(link_no=link.link_no, seq=header.seq, slot=header.slot))
        if not was_usable:
            self._cancel_timer()
            self._retry_s = RETRY_MIN_S
            logger.info("worker_id=%s link over %s is open", self.info.worker_id, link.transport)

    def settle(self, header: Chunk, nack_reason: str | None = None) -> None:
        """Return a chunk's slot to the source: with CREDIT, or with NACK and why."""
        link = self._link
        if link is None or link.link_no != header.link_no:
            return  # its link is gone, and the slot with it
        link.vacate(header.slot)
        if nack_reason is None:
            self.post(Credit(link_no=link.link_no, seq=header.seq, slot=header.slot))
        else:
            self.post(Nack(link_no=link.link_no, seq=header.seq, slot=header.slot, reason=nack_reason))

    def count_bytes(self, header: Chunk) -> None:
        """Count a verified chunk for status."""
        if self._link is not None and self._link.link_no == header.link_no:
            self._link.num_bytes += header.num_bytes

    def link_fenced(self, link_no: int) -> None:
        """The landing thread is done with a link."""
        link = self._fencing.pop(link_no, None)
        if link is not None:
            link.fenced()

    def _give_up(self, link: IncomingLink, reason: str, *, tell_source: bool = True) -> None:
        """Close the link and open another one after a pause, over the next transport if this one never worked."""
        if link is not self._link:
            return
        now = self._settings.clock.now()
        self._failure_times = [time for time in self._failure_times if now - time < DEMOTION_WINDOW_S] + [now]
        never_worked = link.life.state in (LinkState.OPENING, LinkState.TESTING)
        if never_worked or len(self._failure_times) >= DEMOTION_FAILURES:
            self._failure_times = []
            self._next_transport += 1
            self._metrics.demotions.inc()
        logger.warning("worker_id=%s link over %s: %s", self.info.worker_id, link.transport, reason)
        self._drop_link(reason, tell_source=tell_source)
        if self._channel is not None:
            is_next_at_once = self._next_transport % len(self._settings.config.transports) != 0
            self._set_timer(0.0 if is_next_at_once else self._retry_s, self._open_again)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _open_again(self) -> None:
        if self._channel is not None and self._link is None:
            self._open()

    def _drop_link(self, reason: str, *, tell_source: bool) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if tell_source:
            self.post(CloseLink(link_no=link.link_no, reason=reason))
        self._metrics.fences.inc()
        self._fencing[link.link_no] = link
        link.break_off()
        self._tasks.start(link.fence())
        self._events.link_lost(self, reason)

    def _set_timer(self, delay_s: float, act: Callable[..., None], *arguments: object) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(delay_s, act, *arguments)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
