"""The source's end of one link: its life, its sender, and which transport it has."""

import asyncio
import logging
from collections.abc import Callable

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.rank_messages import LinkMessage
from pdserve.cluster.base.transfer_messages import Chunk, LinkOffer
from pdserve.kvtransfer.chunk_stream import ChunkStream
from pdserve.kvtransfer.link import LinkEvent, LinkLife, LinkState
from pdserve.kvtransfer.sender import ChunkSender, SenderEvents
from pdserve.kvtransfer.slots import SlotLedger, SlotPool
from pdserve.workers.handoff.settings import RankSettings

logger = logging.getLogger(__name__)

JOIN_S = 5.0


class OutgoingLink:
    """Made for each OpenLink."""

    def __init__(
        self,
        link_no: int,
        stream: ChunkStream,
        transport_name: str,
        key: str,
        settings: RankSettings,
        pool: SlotPool,
        events: SenderEvents,
        post: Callable[[LinkMessage], None],
    ) -> None:
        """`key` tells the links of this rank apart; `post` sends a message to the sink.

        Raises ProtocolError if the transport is unknown or no slots are left, OSError if memory cannot be had.
        """
        self.link_no = link_no
        self.stream = stream
        self.life = LinkLife()
        self.used_time = settings.clock.now()
        self._has_attached = False
        self._post = post
        config = settings.config
        ledger = SlotLedger(pool, base=config.base_slots, most=config.max_slots_per_link)
        try:
            self._transport = settings.transports.make_sender(transport_name, key)
        except BaseException:
            ledger.close()
            raise
        self.sender = ChunkSender(
            link_no, stream.number, self._transport, ledger, events, settings.clock, test_bytes=settings.test_bytes
        )

    def sent(self, header: Chunk) -> None:
        """A chunk left: post its header, unless it went with its bytes; on the loop."""
        if not self._transport.carries_headers:
            self._post(header)

    def offer(self, settings: RankSettings) -> LinkOffer:
        """Return where the sink attaches."""
        return LinkOffer(
            link_no=self.link_no,
            stream_no=self.stream.number,
            address=self._transport.address,
            slot_bytes=settings.config.slot_bytes,
            num_slots=settings.config.max_slots_per_link,
        )

    def note_attached(self) -> None:
        """The sink says that it has attached. Raises ProtocolError if it said so before."""
        if self._has_attached:
            raise ProtocolError(f"link {self.link_no} was attached to twice")
        self._has_attached = True

    async def begin_test(self, answer: str) -> None:
        """The sink has attached: start the sender and let it send the test pattern. Raises OSError or ProtocolError."""
        await self._transport.wait_attached(answer)
        if self.life.state is not LinkState.OPENING:
            return  # it was closed meanwhile
        self.life.apply(LinkEvent.ATTACHED)
        self.sender.start()
        self.sender.send_test()

    def tested(self) -> None:
        """The sink has verified the test pattern: the link may carry its stream."""
        is_first = self.life.state is LinkState.TESTING
        self.life.apply(LinkEvent.TESTED)
        if is_first:
            # Once: a newer link may carry the stream by now.
            self.stream.carry_by(self.sender)

    def break_off(self) -> None:
        """Stop sending; `fence` completes it."""
        self.life.apply(LinkEvent.LOST)
        self.sender.close()

    async def fence(self) -> None:
        """Wait until nobody touches the link's slots."""
        if not await asyncio.to_thread(self.sender.join, JOIN_S):
            logger.error("link_no=%d the sender thread did not end within %g s", self.link_no, JOIN_S)
        self.life.apply(LinkEvent.FENCED)
