"""A prefill worker as a decode worker sees it: the channel to it, and a link for each stream of the pair.

Opens by itself and again after a loss. A pair that cannot exchange KV stays refused, with the field, for as long as
both live.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Chunk, CloseLink, Hello, HelloOk, LinkOffer, Refuse
from pdserve.cluster.base.wire import Channel, ChannelClient
from pdserve.cluster.base.worker_info import Endpoint, LinkView, WorkerInfo
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.layout import Stream, plan_streams
from pdserve.workers.handoff.link_keeper import LinkKeeper
from pdserve.workers.handoff.settings import HandoffSettings

logger = logging.getLogger(__name__)


class PeerEvents(Protocol):
    """What a peer tells the sink service; on the loop."""

    def link_lost(self, peer: "SourcePeer", stream_no: int, reason: str) -> None:
        """The link of a stream has broken. The channel lives, and the peer's transfers go on over the next link."""

    def peer_lost(self, peer: "SourcePeer", reason: str) -> None:
        """The peer's transfers are over."""

    def transfer_message(self, peer: "SourcePeer", message: Message) -> None:
        """A message about a transfer. Raises ProtocolError for what cannot be."""


class SourcePeer:
    """One life of a prefill worker."""

    def __init__(
        self,
        info: WorkerInfo,
        settings: HandoffSettings,
        landings: Sequence[LandingThread],
        events: PeerEvents,
        metrics: TransferMetrics,
        draw_link_no: Callable[[], int],
    ) -> None:
        self.info = info
        self.note = ""
        self.streams: tuple[Stream, ...] = ()
        self._settings = settings
        self._landings = landings
        self._events = events
        self._metrics = metrics
        self._draw_link_no = draw_link_no
        self._channel: Channel | None = None
        self._keepers: list[LinkKeeper] = []
        self._past: list[LinkKeeper] = []
        self._tasks = BackgroundTasks(f"the links to {info.worker_id}")

        async def resolve() -> Endpoint:
            return info.endpoint

        self._client = ChannelClient(settings.channel, self, resolve, name=info.worker_id)
        self._client.start()

    async def stop(self) -> None:
        """Disconnect; the links are fenced."""
        await self._client.stop()
        await self._tasks.wait()

    @property
    def worker_id(self) -> WorkerId:
        """See LinkPair."""
        return self.info.worker_id

    @property
    def incarnation(self) -> Incarnation:
        """See LinkPair."""
        return self.info.incarnation

    @property
    def is_connected(self) -> bool:
        """See LinkPair."""
        return self._channel is not None

    @property
    def is_usable(self) -> bool:
        """True if every stream has an open link: transfers may begin."""
        return bool(self._keepers) and all(keeper.is_open for keeper in self._keepers)

    @property
    def num_occupied_slots(self) -> int:
        """Slots that hold a chunk not yet credited."""
        return sum(keeper.num_occupied_slots for keeper in self._keepers)

    @property
    def transports(self) -> str:
        """The transports of the links, for timelines."""
        names = [keeper.link.transport.value for keeper in self._keepers if keeper.link is not None]
        return "+".join(dict.fromkeys(names))

    def views(self, num_transfers: int) -> list[LinkView]:
        """Return what status shows, a view for each link."""

        def view(transport: str, state: str, num_bytes: int, stream: Stream | None) -> LinkView:
            return LinkView(
                peer=self.info.worker_id,
                transport=transport,
                state=state,
                source_rank=0 if stream is None else stream.source_rank,
                sink_rank=0 if stream is None else stream.sink_rank,
                num_transfers=num_transfers,
                num_bytes=num_bytes,
                note=self.note,
            )

        if not self._keepers:
            return [view("", "connecting", 0, None)]
        links = [(self.streams[keeper.stream_no], keeper.link) for keeper in self._keepers]
        return [
            view("", "connecting", 0, stream)
            if link is None
            else view(link.transport.value, link.life.state.value, link.num_bytes, stream)
            for stream, link in links
        ]

    def post(self, message: Message) -> None:
        """Send a message; lost if the channel has gone, which is reported by itself."""
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            logger.debug("worker_id=%s a message could not be posted: %s", self.info.worker_id, error)

    def link_lost(self, stream_no: int, reason: str) -> None:
        """See LinkPair."""
        self._events.link_lost(self, stream_no, reason)

    def no_link_left(self, reason: str) -> None:
        """See LinkPair."""
        self._events.peer_lost(self, f"no link to {self.info.worker_id}: {reason}")

    def prefer_better(self) -> None:
        """No transfer uses the links: change to better transports that have rested."""
        for keeper in self._keepers:
            keeper.prefer_better()

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
        keepers, self._keepers = self._keepers, []
        self._past.extend(keepers)
        for keeper in keepers:
            keeper.close(lost)
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
                case LinkOffer():
                    for keeper in self._keepers:
                        keeper.offered(message)
                case CloseLink():
                    for keeper in self._keepers:
                        keeper.closed_by_source(message)
                case Chunk():
                    for keeper in self._keepers:
                        keeper.header_received(message)
                case _:
                    self._events.transfer_message(self, message)
        except ProtocolError as error:
            logger.warning("worker_id=%s broke the hand-off protocol: %s", self.info.worker_id, error)
            channel.close(f"protocol error: {error}")

    def _welcomed(self, message: HelloOk) -> None:
        if self._keepers:
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
        self._keepers = [
            LinkKeeper(
                number,
                self,
                self._landings[stream.sink_rank],
                settings,
                self._metrics,
                self._tasks,
                self._draw_link_no,
            )
            for number, stream in enumerate(self.streams)
        ]
        for keeper in self._keepers:
            keeper.open()

    def _class_note(self, message: HelloOk) -> str:
        """Return why the pair's texts are of the tolerance class; empty if they are not."""
        mine = self._settings.layout
        if message.kv.kv_dtype != mine.kv_dtype:
            return f"tolerance class: kv_dtype {message.kv.kv_dtype} there, {mine.kv_dtype} here"
        if message.numerics_digest != self._settings.numerics_digest:
            return "tolerance class: numerics digests differ"
        return ""

    # From the landing threads, on the loop.

    def test_verified(self, header: Chunk, *, is_right: bool) -> None:
        """See LinkKeeper."""
        for keeper in self._keepers:
            keeper.test_verified(header, is_right=is_right)

    def settle(self, header: Chunk, nack_reason: str | None) -> None:
        """See LinkKeeper."""
        for keeper in self._keepers:
            keeper.settle(header, nack_reason)

    def count_bytes(self, header: Chunk) -> None:
        """See LinkKeeper."""
        for keeper in self._keepers:
            keeper.count_bytes(header)

    def link_fenced(self, link_no: int) -> None:
        """See LinkKeeper."""
        for keeper in (*self._keepers, *self._past):
            keeper.link_fenced(link_no)
        self._past = [keeper for keeper in self._past if keeper.is_fencing]
