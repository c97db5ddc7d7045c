"""A decode worker as a rank of a prefill worker sees it: the streams that this rank sends to it, and their links."""

import asyncio
import logging

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.rank_messages import (
    AddPair,
    ChunkCredited,
    ChunkLeft,
    ChunkUnreadable,
    LinkMessage,
    LinkRelay,
    RankCount,
    RankCounter,
    StreamUsable,
)
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import (
    Chunk,
    CloseLink,
    Credit,
    LinkAttached,
    Nack,
    OpenLink,
    TransferId,
)
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.layout import layer_spans, plan_streams
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.sender import OutgoingChunk
from pdserve.kvtransfer.slots import NoSlotsError, SlotPool
from pdserve.workers.handoff.outgoing_link import OutgoingLink
from pdserve.workers.handoff.settings import GIVE_BACK_S, RankSettings, Report

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0
STALLED_SHARE = 0.5
"""A link that waits for a credit for this share of `stall_s` takes no new transfers."""


class SinkLinks:
    """One pair at one rank of its source.

    Attributes:
        streams: those that begin at this rank, by number.
    """

    def __init__(
        self, pair: AddPair, settings: RankSettings, slots: SlotPool, report: Report, tasks: BackgroundTasks
    ) -> None:
        self.pair_no = pair.pair_no
        self.worker_id = pair.worker_id
        self._settings = settings
        self._slots = slots
        self._report = report
        self._tasks = tasks
        self._links: dict[int, OutgoingLink] = {}
        self._usable: set[int] = set()
        self.streams = {
            number: ChunkStream(number, stream, layer_spans(settings.layout, stream, settings.config.slot_bytes))
            for number, stream in enumerate(plan_streams(settings.layout, pair.kv))
            if stream.source_rank == settings.rank
        }

    @property
    def num_outstanding(self) -> int:
        """Chunks sent and not credited, or waiting for a link, over all streams."""
        waiting = sum(stream.num_waiting for stream in self.streams.values())
        return waiting + sum(link.sender.num_outstanding for link in self._links.values())

    def drop_void(self) -> None:
        """Release the chunks of ended transfers."""
        for stream in self.streams.values():
            stream.drop_void()

    # From the sink.

    def message_received(self, message: LinkMessage) -> None:
        """Take what the sink says about a link. Raises ProtocolError for what cannot be."""
        match message:
            case OpenLink():
                self._open(message)
            case LinkAttached(link_no=link_no, answer=answer):
                self._attached(link_no, answer)
            case CloseLink(link_no=link_no, reason=reason):
                self._close(link_no, reason, tell_sink=False)
            case Credit():
                self._credited(message)
            case Nack():
                self._refused(message)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} from a sink")
        self._report_usable()

    def _open(self, message: OpenLink) -> None:
        """Offer a link, or say why there is none."""
        link_no, stream = message.link_no, self.streams.get(message.stream_no)
        if link_no in self._links:
            raise ProtocolError(f"link {link_no} is open already")
        if stream is None:
            raise ProtocolError(f"stream {message.stream_no} is none of this rank")
        events = _LinkEvents(self, link_no, stream)
        key = f"{self._settings.incarnation}-{self.pair_no}-{link_no}"
        try:
            link = OutgoingLink(
                link_no, stream, message.transport, key, self._settings, self._slots, events, self._post
            )
        except (ProtocolError, OSError) as error:
            is_temporary = isinstance(error, NoSlotsError)
            self._post(
                CloseLink(link_no=link_no, stream_no=stream.number, reason=str(error), is_temporary=is_temporary)
            )
            return
        events.link = link
        self._links[link_no] = link
        self._post(link.offer(self._settings))

    def _attached(self, link_no: int, answer: str) -> None:
        """The sink has attached: test the link, if it is still open."""
        link = self._links.get(link_no)
        if link is None:
            return  # it was closed meanwhile
        link.note_attached()
        self._tasks.start(self._test(link, answer))

    async def _test(self, link: OutgoingLink, answer: str) -> None:
        try:
            await link.begin_test(answer)
        except (OSError, ProtocolError) as error:
            self._close(link.link_no, str(error), tell_sink=True)

    def _close(self, link_no: int, reason: str, *, tell_sink: bool) -> None:
        """Fence a link; what it carried goes on over the next one. Fine if it is closed."""
        link = self._links.pop(link_no, None)
        if link is None:
            return
        logger.info("worker_id=%s link_no=%d closed: %s", self.worker_id, link_no, reason)
        link.break_off()
        self._report(RankCount(counter=RankCounter.FENCES))
        if tell_sink:
            self._post(CloseLink(link_no=link_no, stream_no=link.stream.number, reason=reason))
        self._tasks.start(link.fence())
        self._report_usable()

    def close(self) -> None:
        """The sink is gone: fence every link."""
        for stream in self.streams.values():
            stream.close()
        for link_no in list(self._links):
            self._close(link_no, "the sink is gone", tell_sink=False)

    def _credited(self, message: Credit) -> None:
        """A slot is free again. Raises ProtocolError for a credit never earned."""
        link = self._links.get(message.link_no)
        header = None if link is None else link.sender.credited(message.seq, message.slot)
        if link is None or header is None:
            self._report(RankCount(counter=RankCounter.STALE))  # it was on its way when the link closed
            return
        link.used_time = self._settings.clock.now()
        if header.cargo is None:
            link.tested()
            return
        link.life.apply(LinkEvent.CREDITED)
        self._report(ChunkCredited(transfer=header.cargo.transfer, num_bytes=header.num_bytes))

    def _refused(self, message: Nack) -> None:
        """A chunk is sent again, or its link ends. Raises ProtocolError for a chunk that is not outstanding."""
        link = self._links.get(message.link_no)
        if link is None or not link.sender.refused(message.seq, message.slot):
            self._report(RankCount(counter=RankCounter.STALE))
            return
        self._report(RankCount(counter=RankCounter.NACKS))
        logger.warning("worker_id=%s refused chunk %d: %s", self.worker_id, message.seq, message.reason)

    # From the sender threads, on the loop.

    def sent(self, header: Chunk, stall_s: float, is_first: bool) -> None:
        """A chunk left."""
        link = self._links.get(header.link_no)
        if link is not None:
            link.sent(header)
        if header.cargo is not None:
            transfer = header.cargo.transfer
            self._report(ChunkLeft(transfer=transfer, num_bytes=header.num_bytes, stall_s=stall_s, is_first=is_first))

    def unreadable(self, transfer: TransferId, reason: str) -> None:
        """A chunk could not be gathered."""
        self._report(ChunkUnreadable(transfer=transfer, reason=reason))

    def broken(self, link_no: int, reason: str) -> None:
        """A link cannot send any more."""
        self._close(link_no, reason, tell_sink=True)

    # Deadlines.

    def links(self) -> list[OutgoingLink]:
        """Return the links, for the deadline task."""
        return list(self._links.values())

    def check(self, link: OutgoingLink) -> None:
        """Apply the deadlines of a link."""
        config, now = self._settings.config, self._settings.clock.now()
        if link.life.state is LinkState.OPENING:
            if now - link.used_time > OPENING_LIMIT_S:
                self._close(link.link_no, "the sink did not attach", tell_sink=True)
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
            self._close(link.link_no, f"no credit for {stalled_s:.1f} s", tell_sink=True)
            return
        if link.life.state is LinkState.OPEN:
            logger.warning("worker_id=%s link_no=%d stalled", self.worker_id, link.link_no)
        link.life.apply(LinkEvent.STALLED)
        self._report_usable()

    # To rank 0.

    def _post(self, message: LinkMessage) -> None:
        self._report(LinkRelay(pair_no=self.pair_no, message=message))

    def _report_usable(self) -> None:
        """Say which streams have a link that new transfers may use, where that has changed."""
        usable = {link.stream.number for link in self._links.values() if link.life.is_usable}
        for number in self._usable.symmetric_difference(usable):
            self._report(StreamUsable(pair_no=self.pair_no, stream_no=number, is_usable=number in usable))
        self._usable = usable


class _LinkEvents:
    """Hands a sender thread's events to the loop."""

    def __init__(self, links: SinkLinks, link_no: int, stream: ChunkStream) -> None:
        self.link: OutgoingLink | None = None
        self._links = links
        self._link_no = link_no
        self._stream = stream
        self._loop = asyncio.get_running_loop()

    def chunk_sent(self, header: Chunk, stall_s: float, *, is_first: bool) -> None:
        self._loop.call_soon_threadsafe(self._links.sent, header, stall_s, is_first)

    def chunk_failed(self, transfer: TransferId, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._links.unreadable, transfer, reason)

    def left_over(self, chunks: list[OutgoingChunk]) -> None:
        assert self.link is not None, "a sender runs for a link"
        self._stream.take_back(self.link.sender, chunks)

    def link_broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._links.broken, self._link_no, reason)
