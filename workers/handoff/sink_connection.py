"""A decode worker as a prefill worker sees it: the channel it said HELLO on, its streams, and their links."""

import asyncio
import logging
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError, ConfigError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import (
    Cargo,
    Chunk,
    CloseLink,
    Credit,
    Hello,
    Nack,
    OpenLink,
    TransferId,
)
from pdserve.cluster.base.wire import Channel
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.layout import layer_spans, plan_streams
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.sender import OutgoingChunk
from pdserve.kvtransfer.slots import NoSlotsError, SlotPool
from pdserve.workers.handoff.outgoing_link import OutgoingLink
from pdserve.workers.handoff.settings import GIVE_BACK_S, HandoffSettings

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0
STALLED_SHARE = 0.5
"""A link that waits for a credit for this share of `stall_s` takes no new transfers."""


class LinkOwner(Protocol):
    """What a connection tells the source service; on the loop."""

    def chunk_sent(self, cargo: Cargo, num_bytes: int, stall_s: float, *, is_first: bool) -> None:
        """A transfer's chunk is on its way, perhaps not for the first time; it had waited `stall_s` for a slot."""

    def chunk_failed(self, transfer: TransferId, reason: str) -> None:
        """A transfer's chunk could not be gathered."""


class SinkConnection:
    """One decode worker on one channel."""

    def __init__(
        self,
        channel: Channel,
        hello: Hello,
        settings: HandoffSettings,
        slots: SlotPool,
        owner: LinkOwner,
        tasks: BackgroundTasks,
        metrics: TransferMetrics,
    ) -> None:
        """Raises ConfigError if a slot is too small for the pair."""
        self.channel = channel
        self.worker_id = hello.worker_id
        self.incarnation = hello.incarnation
        self._settings = settings
        self._slots = slots
        self._owner = owner
        self._tasks = tasks
        self._metrics = metrics
        self._links: dict[int, OutgoingLink] = {}
        try:
            self.streams = tuple(
                ChunkStream(number, stream, layer_spans(settings.layout, stream, settings.config.slot_bytes))
                for number, stream in enumerate(plan_streams(settings.layout, hello.kv))
            )
        except ValueError as error:
            raise ConfigError(f"transfer.slot_bytes: {error}") from error

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited, or waiting for a link, over all streams."""
        waiting = sum(stream.num_waiting for stream in self.streams)
        return waiting + sum(link.sender.num_outstanding for link in self._links.values())

    @property
    def is_ready(self) -> bool:
        """True if every stream has a link that new transfers may use."""
        usable = {link.stream.number for link in self._links.values() if link.life.is_usable}
        return len(usable) == len(self.streams)

    def drop_void(self) -> None:
        """Release the chunks of ended transfers."""
        for stream in self.streams:
            stream.drop_void()

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
        if not 0 <= message.stream_no < len(self.streams):
            raise ProtocolError(f"stream {message.stream_no} of {len(self.streams)}")
        stream = self.streams[message.stream_no]
        events = _LinkEvents(self, link_no, stream)
        try:
            link = OutgoingLink(link_no, stream, message.transport, self.channel, self._settings, self._slots, events)
        except (ProtocolError, OSError) as error:
            is_temporary = isinstance(error, NoSlotsError)
            self.post(CloseLink(link_no=link_no, reason=str(error), is_temporary=is_temporary))
            return
        events.link = link
        self._links[link_no] = link
        self.post(link.offer(self._settings))

    def attached(self, link_no: int, answer: str) -> None:
        """The sink has attached: test the link, if it is still open. Raises ProtocolError if it said so before."""
        link = self._links.get(link_no)
        if link is None:
            return  # it was closed meanwhile
        link.note_attached()
        self._tasks.start(self._test(link, answer))

    async def _test(self, link: OutgoingLink, answer: str) -> None:
        try:
            await link.begin_test(answer)
        except (OSError, ProtocolError) as error:
            self.close_link(link.link_no, str(error), tell_sink=True)

    def close_link(self, link_no: int, reason: str, *, tell_sink: bool) -> None:
        """Fence a link; what it carried goes on over the next one. Fine if it is closed."""
        link = self._links.pop(link_no, None)
        if link is None:
            return
        logger.info("worker_id=%s link_no=%d closed: %s", self.worker_id, link_no, reason)
        link.break_off()
        self._metrics.fences.inc()
        if tell_sink:
            self.post(CloseLink(link_no=link_no, reason=reason))
        self._tasks.start(link.fence())

    def close(self) -> None:
        """The sink is gone: fence every link."""
        for stream in self.streams:
            stream.close()
        for link_no in list(self._links):
            self.close_link(link_no, "the sink is gone", tell_sink=False)

    def credited(self, message: Credit) -> Chunk | None:
        """Take a credit; return the header of a transfer's chunk. Raises ProtocolError for one never earned."""
        link = self._links.get(message.link_no)
        header = None if link is None else link.sender.credited(message.seq, message.slot)
        if link is None or header is None:
            self._metrics.stale.inc()  # it was on its way when the link closed
            return None
        link.used_time = self._settings.clock.now()
        if header.cargo is None:
            link.tested()
            return None
        link.life.apply(LinkEvent.CREDITED)
        return header

    def refused(self, message: Nack) -> None:
        """A chunk is sent again, or its link ends. Raises ProtocolError for a chunk that is not outstanding."""
        link = self._links.get(message.link_no)
        if link is None or not link.sender.refused(message.seq, message.slot):
            self._metrics.stale.inc()
            return
        self._metrics.nacks.inc()
        logger.warning("worker_id=%s refused chunk %d: %s", self.worker_id, message.seq, message.reason)

    def sent(self, header: Chunk, stall_s: float, is_first: bool) -> None:
        """A chunk left."""
        link = self._links.get(header.link_no)
        if link is not None:
            link.sent(header)
        if header.cargo is not None:
            self._owner.chunk_sent(header.cargo, header.num_bytes, stall_s, is_first=is_first)

    def failed(self, transfer: TransferId, reason: str) -> None:
        """A chunk could not be gathered."""
        self._owner.chunk_failed(transfer, reason)

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
        if stalled_s > STALLED_SHARE * config.stall_s:
            self._stalled(link, stalled_s)
            return
        idle_s = now - link.used_time
        if idle_s > GIVE_BACK_S:
            link.sender.give_back_idle()
        if idle_s > config.test_interval_s and not link.sender.num_outstanding:
            link.used_time = now
            link.sender.send_test()

    def _stalled(self, link: OutgoingLink, stalled_s: float) -> None:
        if stalled_s > self._settings.config.stall_s:
            self.close_link(link.link_no, f"no credit for {stalled_s:.1f} s", tell_sink=True)
            return
        if link.life.state is LinkState.OPEN:
            logger.warning("worker_id=%s link_no=%d stalled", self.worker_id, link.link_no)
        link.life.apply(LinkEvent.STALLED)


class _LinkEvents:
    """Hands a sender thread's events to the loop."""

    def __init__(self, connection: SinkConnection, link_no: int, stream: ChunkStream) -> None:
        self.link: OutgoingLink | None = None
        self._connection = connection
        self._link_no = link_no
        self._stream = stream
        self._loop = asyncio.get_running_loop()

    def chunk_sent(self, header: Chunk, stall_s: float, *, is_first: bool) -> None:
        self._loop.call_soon_threadsafe(self._connection.sent, header, stall_s, is_first)

    def chunk_failed(self, transfer: TransferId, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._connection.failed, transfer, reason)

    def left_over(self, chunks: list[OutgoingChunk]) -> None:
        assert self.link is not None, "a sender runs for a link"
        self._stream.take_back(self.link.sender, chunks)

    def link_broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._broken, reason)

    def _broken(self, reason: str) -> None:
        self._connection.close_link(self._link_no, reason, tell_sink=True)
