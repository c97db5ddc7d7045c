"""A decode worker as a prefill worker sees it: the channel it said HELLO on, and the links it has opened there."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk, CloseLink, Credit, Hello, Nack, OpenLink, TransferId
from pdserve.cluster.base.wire import Channel
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.slots import SlotPool
from pdserve.kvtransfer.transports.tcp import TcpListener
from pdserve.workers.handoff.outgoing_link import OutgoingLink
from pdserve.workers.handoff.settings import GIVE_BACK_S, HandoffSettings

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0
STALLED_LIMIT = 3.0
"""A link that stalls for this many times `stall_s` is given up: the sink opens another one."""


class LinkOwner(Protocol):
    """What a connection tells the source service; on the loop."""

    def chunk_sent(self, header: Chunk, stall_s: float) -> None:
        """A transfer's chunk is on its way; it had waited `stall_s` for a slot."""

    def fail_transfers(self, transfers: Iterable[TransferId], reason: str) -> None:
        """The link of these transfers carries nothing more, or not now."""


class SinkConnection:
    """One decode worker on one channel."""

    def __init__(
        self,
        channel: Channel,
        hello: Hello,
        settings: HandoffSettings,
        slots: SlotPool,
        listener: TcpListener,
        owner: LinkOwner,
        tasks: BackgroundTasks,
        metrics: TransferMetrics,
    ) -> None:
        self.channel = channel
        self.worker_id = hello.worker_id
        self.incarnation = hello.incarnation
        self._settings = settings
        self._slots = slots
        self._listener = listener
        self._owner = owner
        self._tasks = tasks
        self._metrics = metrics
        self._links: dict[int, OutgoingLink] = {}

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited, over all links."""
        return sum(link.sender.num_outstanding for link in self._links.values())

    def usable_link(self, link_no: int) -> OutgoingLink | None:
        """Return a link that new transfers may use."""
        link = self._links.get(link_no)
        return link if link is not None and link.life.is_usable else None

    def post(self, message: Message) -> None:
        """Send a message; lost if the channel has gone: that is reported, and ends what it carried."""
        try:
            self.channel.post(message)
        except ChannelClosedError as error:
            logger.debug("worker_id=%s a message could not be posted: %s", self.worker_id, error)

    def open_link(self, message: OpenLink) -> None:
        """Offer a link, or say why there is none. Raises ProtocolError for a number in use."""
        link_no = message.link_no
        if link_no in self._links:
            raise ProtocolError(f"link {link_no} is open already")
        events = _LinkEvents(self, link_no)
        try:
            link = OutgoingLink(
                link_no, message.transport, self.channel, self._settings, self._slots, self._listener, events
            )
        except (ProtocolError, OSError) as error:
            self.post(CloseLink(link_no=link_no, reason=str(error)))
            return
        self._links[link_no] = link
        self.post(link.offer(self._settings))

    def attached(self, link_no: int, answer: str) -> None:
        """The sink has attached: test the link, if it is still open. Raises ProtocolError if it said so before."""
        link = self._links.get(link_no)
        if link is None:
            return  # it was closed meanwhile
        link.expect_test()
        self._tasks.start(self._test(link, answer))

    async def _test(self, link: OutgoingLink, answer: str) -> None:
        try:
            await link.begin_test(answer)
        except (OSError, ProtocolError) as error:
            self.close_link(link.link_no, str(error), tell_sink=True)

    def close_link(self, link_no: int, reason: str, *, tell_sink: bool) -> None:
        """Fence a link; its transfers end. Fine if it is closed."""
        link = self._links.pop(link_no, None)
        if link is None:
            return
        logger.info("worker_id=%s link_no=%d closed: %s", self.worker_id, link_no, reason)
        link.break_off()
        self._metrics.fences.inc()
        if tell_sink:
            self.post(CloseLink(link_no=link_no, reason=reason))
        self._owner.fail_transfers(list(link.transfers), f"link closed: {reason}")
        self._tasks.start(link.fence())

    def close(self) -> None:
        """The sink is gone: fence every link."""
        for link_no in list(self._links):
            self.close_link(link_no, "the sink is gone", tell_sink=False)

    def credited(self, message: Credit) -> Chunk | None:
        """Take a credit; return the header of a transfer's chunk. Raises ProtocolError for one never earned."""
        link = self._links.get(message.link_no)
        if link is None or link.sender.is_closing:
            self._metrics.stale.inc()  # it was on its way when the link closed
            return None
        header = link.sender.credited(message.seq, message.slot)
        link.used_time = self._settings.clock.now()
        if header.transfer is None:
            link.life.apply(LinkEvent.TESTED)
            return None
        link.life.apply(LinkEvent.CREDITED)
        return header

    def refused(self, message: Nack) -> None:
        """A chunk is sent again, or its link ends. Raises ProtocolError for a chunk that is not outstanding."""
        link = self._links.get(message.link_no)
        if link is None or link.sender.is_closing:
            self._metrics.stale.inc()
            return
        self._metrics.nacks.inc()
        logger.warning("worker_id=%s refused chunk %d: %s", self.worker_id, message.seq, message.reason)
        link.sender.refused(message.seq, message.slot)

    def sent(self, link_no: int, header: Chunk, stall_s: float) -> None:
        """A chunk left."""
        link = self._links.get(link_no)
        if link is not None:
            link.sent(header)
        if header.transfer is not None:
            self._owner.chunk_sent(header, stall_s)

    def links(self) -> list[OutgoingLink]:
        """Return the links, for the deadline task."""
        return list(self._links.values())

    def check(self, link: OutgoingLink) -> None:
        """Apply the deadlines of a link."""
        config, now = self._settings.config, self._settings.clock.now()
        if link.life.state is LinkState.OPENING:
            if now - link.used_time > OPENING_LIMIT_S:
                self.close_link(link.link_no, "the sink did not attach", tell_sink=True)
            return
        stalled_s = link.sender.stalled_for()
        if stalled_s > config.stall_s:
            self._stalled(link, stalled_s)
            return
        idle_s = now - link.used_time
        if idle_s > GIVE_BACK_S:
            link.sender.give_back_idle()
        if idle_s > config.test_interval_s and not link.sender.num_outstanding:
            link.used_time = now
            link.sender.send_test()

    def _stalled(self, link: OutgoingLink, stalled_s: float) -> None:
        if link.life.state is LinkState.TESTING or stalled_s > STALLED_LIMIT * self._settings.config.stall_s:
            self.close_link(link.link_no, f"no credit for {stalled_s:.1f} s", tell_sink=True)
            return
        if link.life.state is not LinkState.STALLED:
            logger.warning("worker_id=%s link_no=%d stalled", self.worker_id, link.link_no)
        link.life.apply(LinkEvent.STALLED)
        self._owner.fail_transfers(list(link.transfers), "the link stalled")


class _LinkEvents:
    """Hands a sender thread's events to the loop."""

    def __init__(self, connection: SinkConnection, link_no: int) -> None:
        self._connection = connection
        self._link_no = link_no
        self._loop = asyncio.get_running_loop()

    def chunk_sent(self, header: Chunk, stall_s: float) -> None:
        self._loop.call_soon_threadsafe(self._connection.sent, self._link_no, header, stall_s)

    def link_broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._broken, reason)

    def _broken(self, reason: str) -> None:
        self._connection.close_link(self._link_no, reason, tell_sink=True)
