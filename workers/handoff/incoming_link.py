"""The sink's end of one link: its life, where its chunks land, and how it opens."""

import asyncio
from collections.abc import Callable

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.transfer_messages import Chunk, LinkOffer
from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.link import LinkEvent, LinkLife, LinkState
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.protocol import ReceiveTransport
from pdserve.workers.handoff.settings import RankSettings

MAX_SLOTS = 4096
MAX_SLOT_BYTES = 1 << 30


class IncomingLink:
    """Made for each OpenLink that is sent."""

    def __init__(
        self,
        link_no: int,
        stream_no: int,
        transport: TransportKind,
        source: Incarnation,
        landing: LandingThread,
    ) -> None:
        self.link_no = link_no
        self._source = source
        self.transport = transport
        self.life = LinkLife()
        self._stream_no = stream_no
        self._landing = landing
        self._receiver: ReceiveTransport | None = None
        self._slots: LandingSlots | None = None
        self._fenced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def attach(self, offer: LinkOffer, settings: RankSettings, on_broken: Callable[[str], None]) -> str:
        """Connect to what the source offers; return what it needs to know. Raises OSError or ProtocolError.

        `on_broken` runs on any thread.
        """
        if self._receiver is not None:
            raise ProtocolError(f"link {self.link_no} was offered twice")
        if not (0 < offer.num_slots <= MAX_SLOTS and 0 < offer.slot_bytes <= MAX_SLOT_BYTES):
            raise ProtocolError(f"a link of {offer.num_slots} slots of {offer.slot_bytes} bytes")
        self._slots = LandingSlots(
            link_no=self.link_no,
            stream_no=self._stream_no,
            source=self._source,
            num_slots=offer.num_slots,
            slot_bytes=offer.slot_bytes,
        )
        receiver = settings.transports.make_receiver(self.transport, offer, self._slots, self._landed, on_broken)
        # Known before it attaches, so that whatever it holds is freed.
        self._receiver = receiver
        await receiver.attach()
        if self.life.state is LinkState.OPENING:
            self.life.apply(LinkEvent.ATTACHED)
        else:
            # It was given up meanwhile, perhaps fenced already.
            receiver.close()
            await receiver.free()
            raise ProtocolError("the link was given up while it attached")
        return receiver.answer

    def header_received(self, header: Chunk) -> None:
        """A header came over the control channel. Raises ProtocolError."""
        if self._receiver is None or self.life.has_ended:
            raise ProtocolError(f"a chunk header for link {self.link_no}, which takes none now")
        self._receiver.header_received(header)

    def _landed(self, header: Chunk) -> None:
        assert self._receiver is not None, "chunks come after attaching"
        self._landing.landed(header, self._receiver)

    def vacate(self, slot: int) -> None:
        """The slot goes back to the source: called before its CREDIT or NACK is posted."""
        assert self._slots is not None, "chunks come after attaching"
        self._slots.vacate(slot)

    @property
    def num_occupied(self) -> int:
        """Slots that hold a chunk."""
        return 0 if self._slots is None else len(self._slots)

    def break_off(self) -> None:
        """Nothing that lands counts any more; `fence` completes it."""
        self.life.apply(LinkEvent.LOST)
        if self._receiver is not None:
            self._receiver.close()
        self._landing.fence(self.link_no)

    def fenced(self) -> None:
        """The landing thread uses no slot of the link any more."""
        if not self._fenced.done():
            self._fenced.set_result(None)

    async def fence(self) -> None:
        """Wait until nobody reads the slots, then free them."""
        await self._fenced
        if self._receiver is not None:
            await self._receiver.free()
        self._landing.forget(self.link_no)
        self.life.apply(LinkEvent.FENCED)
