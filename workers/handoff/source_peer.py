"""A prefill worker as a decode worker sees it: the channel to it, and which streams of the pair have a link.

The links are the ranks' (source_links.py); here is what they say about them. Connects by itself and again after a loss.
A pair that cannot exchange KV stays refused, with the field, for as long as both live.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, get_args

from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.online_fit import OnlineFit
from pdserve.cluster.base.rank_messages import (
    AddPair,
    DropPair,
    LinkMessage,
    LinkRelay,
    LinkReport,
    PreferBetter,
)
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Hello, HelloOk, Refuse
from pdserve.cluster.base.wire import Channel, ChannelClient
from pdserve.cluster.base.worker_info import Endpoint, LinkView, TransferFit, WorkerInfo
from pdserve.kvtransfer.layout import Stream, plan_streams
from pdserve.workers.handoff.settings import HandoffSettings, RankPort

logger = logging.getLogger(__name__)

LINK_MESSAGES = get_args(LinkMessage)
TAIL_SCALES = (1.0, 1e6)


class PeerEvents(Protocol):
    """What a peer tells the sink service; on the loop."""

    def peer_lost(self, peer: "SourcePeer", reason: str) -> None:
        """The peer's transfers are over."""

    def transfer_message(self, peer: "SourcePeer", message: Message) -> None:
        """A message about a transfer. Raises ProtocolError for what cannot be."""


class SourcePeer:
    """One life of a prefill worker.

    Attributes:
        pair_no: of the present channel; 0 without one.
    """

    def __init__(
        self,
        info: WorkerInfo,
        settings: HandoffSettings,
        ranks: Sequence[RankPort],
        events: PeerEvents,
        draw_pair_no: Callable[[], int],
    ) -> None:
        self.info = info
        self.note = ""
        self.streams: tuple[Stream, ...] = ()
        self.pair_no = 0
        self._settings = settings
        self._ranks = ranks
        self._events = events
        self._draw_pair_no = draw_pair_no
        self._channel: Channel | None = None
        self._links: dict[int, LinkReport] = {}
        self._num_bytes: dict[int, int] = {}
        self._tail = OnlineFit(TAIL_SCALES)
        self._tasks = BackgroundTasks(f"the channel to {info.worker_id}")

        async def resolve() -> Endpoint:
            return info.endpoint

        self._client = ChannelClient(settings.channel, self, resolve, name=info.worker_id)
        self._client.start()

    async def stop(self) -> None:
        """Disconnect; the links are fenced."""
        await self._client.stop()
        await self._tasks.wait()

    @property
    def is_usable(self) -> bool:
        """True if every stream has an open link: transfers may begin."""
        num_usable = sum(link.is_usable for link in self._links.values())
        return self.pair_no > 0 and num_usable == len(self.streams)

    @property
    def transports(self) -> str:
        """The transports of the links, for timelines."""
        names = [link.transport for _, link in sorted(self._links.items()) if link.transport]
        return "+".join(dict.fromkeys(names))

    def views(self, num_transfers: int) -> list[LinkView]:
        """Return what status shows, a view for each link."""

        def view(stream: Stream | None, link: LinkReport | None) -> LinkView:
            return LinkView(
                peer=self.info.worker_id,
                transport="" if link is None else link.transport,
                state="connecting" if link is None else link.state,
                source_rank=0 if stream is None else stream.source_rank,
                sink_rank=0 if stream is None else stream.sink_rank,
                num_transfers=num_transfers,
                num_bytes=0 if link is None else self._num_bytes.get(link.link_no, 0),
                note=self.note,
            )

        if not self.pair_no:
            return [view(None, None)]
        return [view(stream, self._links.get(number)) for number, stream in enumerate(self.streams)]

    def post(self, message: Message) -> None:
        """Send a message; lost if the channel has gone, which is reported by itself."""
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            logger.debug("worker_id=%s a message could not be posted: %s", self.info.worker_id, error)

    def prefer_better(self) -> None:
        """No transfer uses the links: change to better transports that have rested."""
        if self.pair_no:
            for rank in self._ranks:
                rank.post(PreferBetter(pair_no=self.pair_no))

    def link_reported(self, report: LinkReport) -> None:
        """A rank says what the link of a stream is now."""
        before = self._links.get(report.stream_no)
        if before is not None and before.link_no != report.link_no:
            self._num_bytes.pop(before.link_no, None)
        self._links[report.stream_no] = report

    def count_bytes(self, link_no: int, num_bytes: int) -> None:
        """A link has brought a verified chunk."""
        self._num_bytes[link_no] = self._num_bytes.get(link_no, 0) + num_bytes

    def observe_tail(self, num_late_bytes: int, duration_s: float) -> None:
        """A transfer was whole so long after its prompt was computed, when so many bytes were still to be sent."""
        self._tail.observe((1.0, num_late_bytes), duration_s)

    @property
    def fit(self) -> TransferFit:
        """What its transfers take, so far."""
        latency, per_byte = self._tail.coefficients.tolist()
        return TransferFit(
            source=self.info.worker_id,
            latency=latency,
            per_byte=per_byte,
            num_observations=self._tail.num_observations,
            relative_error=self._tail.relative_error,
        )

    # The channel.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
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
        lost = f"worker {self.info.worker_id} was lost: {reason}"
        if self.pair_no:
            for rank in self._ranks:
                rank.post(DropPair(pair_no=self.pair_no, reason=lost))
        self.pair_no = 0
        self._links.clear()
        self._num_bytes.clear()
        self._events.peer_lost(self, lost)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler. A source that breaks the protocol loses its channel."""
        try:
            match message:
                case HelloOk():
                    self._welcomed(message)
                case Refuse(reason=reason):
                    self.note = f"refused: {reason}"
                    logger.warning("worker_id=%s refuses this worker: %s", self.info.worker_id, reason)
                case _ if isinstance(message, LINK_MESSAGES):
                    self._relay(message)
                case _:
                    self._events.transfer_message(self, message)
        except ProtocolError as error:
            logger.warning("worker_id=%s broke the hand-off protocol: %s", self.info.worker_id, error)
            channel.close(f"protocol error: {error}")

    def _relay(self, message: LinkMessage) -> None:
        if not self.pair_no or not 0 <= message.stream_no < len(self.streams):
            raise ProtocolError(f"{type(message).__name__} about stream {message.stream_no}")
        rank = self._ranks[self.streams[message.stream_no].sink_rank]
        rank.post(LinkRelay(pair_no=self.pair_no, message=message))

    def _welcomed(self, message: HelloOk) -> None:
        if self.pair_no:
            raise ProtocolError("HELLO was answered twice")
        settings = self._settings
        refusal = settings.layout.refusal(message.kv)
        if message.incarnation != self.info.incarnation:
            refusal = f"incarnation: {self.info.incarnation!r} announced, {message.incarnation!r} there"
        if refusal is not None:
            self.note = f"refused: {refusal}"
            logger.warning("worker_id=%s does not fit: %s", self.info.worker_id, refusal)
            return
        self.note = self._class_note(message)
        self.streams = plan_streams(message.kv, settings.layout)
        self.pair_no = self._draw_pair_no()
        pair = AddPair(
            pair_no=self.pair_no,
            worker_id=self.info.worker_id,
            incarnation=self.info.incarnation,
            kv=message.kv,
        )
        for rank in self._ranks:
            rank.post(pair)

    def _class_note(self, message: HelloOk) -> str:
        """Return why the pair's texts are of the tolerance class; empty if they are not."""
        mine = self._settings.layout
        if message.kv.kv_dtype != mine.kv_dtype:
            return f"tolerance class: kv_dtype {message.kv.kv_dtype} there, {mine.kv_dtype} here"
        if message.kv.tp_size != mine.tp_size:
            return f"tolerance class: {message.kv.tp_size} ranks there, {mine.tp_size} here"
        if message.numerics_digest != self._settings.numerics_digest:
            return "tolerance class: numerics digests differ"
        return ""
