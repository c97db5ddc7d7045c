"""A rank's part of the sink side: its links to prefill workers, and the thread that scatters what they bring.

Runs on the loop of the rank's process, which for rank 0 is the worker's. It carries out what rank 0 orders and reports
what happened; it decides nothing about a transfer (I9).
"""

import asyncio
import logging
from itertools import count

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.rank_messages import (
    AddPair,
    BindTransfer,
    ChunkLanded,
    ChunkRefused,
    DropPair,
    ExpectTransfer,
    HandoffOrder,
    LinkRelay,
    PreferBetter,
    RankCount,
    RankCounter,
    RankState,
    TransferUnbound,
    UnbindTransfer,
)
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import Cargo, Chunk, TransferId
from pdserve.kvtransfer.landing import CHECKSUM, LandingThread
from pdserve.workers.handoff.block_target import BlockTarget
from pdserve.workers.handoff.link_keeper import LinkKeeper
from pdserve.workers.handoff.settings import TICK_S, RankSettings, Report
from pdserve.workers.handoff.source_links import SourceLinks

logger = logging.getLogger(__name__)

STOP_S = 5.0


class SinkRank:
    """See RankPort."""

    num_lent_slots = 0

    def __init__(self, settings: RankSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._pairs: dict[int, SourceLinks] = {}
        self._past: list[SourceLinks] = []
        # No two ranks of the worker draw one number.
        self._link_numbers = count(1 + settings.rank, settings.layout.tp_size)
        self._tasks = BackgroundTasks("the sink's links")
        self._watcher: asyncio.Task[None] | None = None
        self._reported = RankState(is_idle=True, num_lent_slots=0)
        self._landing = LandingThread(_LandingEvents(self), settings.incarnation)

    def start(self) -> None:
        """Begin to land chunks."""
        self._landing.start()
        self._watcher = self._tasks.start(self._watch(), name="sink rank state")

    async def stop(self) -> None:
        """Fence every link and end the landing thread."""
        for pair_no in list(self._pairs):
            self._drop(pair_no, "the worker stops")
        if self._watcher is not None:
            self._watcher.cancel()
        await self._tasks.wait()
        if not await asyncio.to_thread(self._landing.stop, STOP_S):
            logger.error("the landing thread did not end within %g s", STOP_S)

    @property
    def is_idle(self) -> bool:
        """See RankPort."""
        return self._num_held == 0

    @property
    def is_receiving(self) -> bool:
        """True while chunks may come; from any thread."""
        return self._landing.num_transfers > 0

    @property
    def _num_held(self) -> int:
        return self._landing.num_transfers + sum(pair.num_occupied_slots for pair in self._pairs.values())

    def post(self, order: HandoffOrder) -> None:
        """See RankPort."""
        match order:
            case AddPair(pair_no=pair_no):
                self._pairs[pair_no] = SourceLinks(
                    order,
                    self._settings,
                    self._landing,
                    self._report,
                    self._tasks,
                    lambda: next(self._link_numbers),
                )
            case DropPair(pair_no=pair_no, reason=reason):
                self._drop(pair_no, reason)
            case LinkRelay(pair_no=pair_no, message=message):
                pair = self._pairs.get(pair_no)
                if pair is not None:
                    pair.message_received(message)
            case ExpectTransfer(transfer=transfer):
                self._landing.expect(transfer)
                self._settings.transports.wake()
            case BindTransfer():
                self._bind(order)
            case UnbindTransfer(transfer=transfer):
                self._landing.unbind(transfer)
            case PreferBetter(pair_no=pair_no):
                for keeper in self._pairs[pair_no].keepers:
                    keeper.prefer_better()
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for a sink")

    def links_of(self, pair_no: int) -> SourceLinks:
        """Return the links of a pair; for tests."""
        return self._pairs[pair_no]

    def _drop(self, pair_no: int, reason: str) -> None:
        pair = self._pairs.pop(pair_no)
        self._past.append(pair)
        pair.close(reason)

    def _bind(self, order: BindTransfer) -> None:
        pair = self._pairs.get(order.pair_no)
        if pair is None:
            return  # it was dropped, and the transfer will be unbound
        target = BlockTarget(
            self._settings.copier,
            pair.streams,
            order.blocks,
            order.num_tokens,
            num_cached_tokens=order.num_cached_tokens,
        )
        self._landing.bind(order.transfer, target)

    # From the landing thread, on the loop.

    def chunk_scattered(self, header: Chunk) -> None:
        """Credit the chunk, then tell."""
        cargo = _cargo_of(header)
        keeper = self._keeper(header)
        if keeper is not None:
            keeper.settle(header, None)
        self._report(
            ChunkLanded(
                stream_no=header.stream_no,
                link_no=header.link_no,
                seq=header.seq,
                num_bytes=header.num_bytes,
                cargo=cargo,
            )
        )

    def chunk_dropped(self, header: Chunk) -> None:
        """Nobody wanted the chunk: credit it."""
        keeper = self._keeper(header)
        if keeper is not None:
            keeper.settle(header, None)
        self._report(RankCount(counter=RankCounter.STALE))

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        """A chunk that failed its checksum is sent again (NACK); of one that does not belong the slot goes back."""
        keeper = self._keeper(header)
        if keeper is not None:
            keeper.settle(header, reason if reason == CHECKSUM else None)
        self._report(ChunkRefused(stream_no=header.stream_no, cargo=_cargo_of(header), reason=reason))

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        """A link's test pattern has come."""
        keeper = self._keeper(header)
        if keeper is not None:
            keeper.test_verified(header, is_right=is_right)

    def unbound(self, transfer: TransferId) -> None:
        """Nothing writes the transfer's blocks here any more."""
        self._report(TransferUnbound(transfer=transfer))

    def link_fenced(self, link_no: int) -> None:
        """Nothing reads the link's slots any more."""
        for pair in (*self._pairs.values(), *self._past):
            pair.link_fenced(link_no)
        self._past = [pair for pair in self._past if pair.is_fencing]

    def _keeper(self, header: Chunk) -> LinkKeeper | None:
        found = (pair.keeper_of(header) for pair in self._pairs.values())
        return next((keeper for keeper in found if keeper is not None), None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tasks.guarded(self._report_state)

    def _report_state(self) -> None:
        state = RankState(is_idle=self.is_idle, num_lent_slots=0)
        if state != self._reported:
            self._reported = state
            self._report(state)


def _cargo_of(header: Chunk) -> Cargo:
    assert header.cargo is not None, "test patterns are reported by themselves"
    return header.cargo


class _LandingEvents:
    """Hands a landing thread's events to the loop."""

    def __init__(self, rank: SinkRank) -> None:
        self._rank = rank
        self._loop = asyncio.get_running_loop()

    def chunk_scattered(self, header: Chunk) -> None:
        self._loop.call_soon_threadsafe(self._rank.chunk_scattered, header)

    def chunk_dropped(self, header: Chunk) -> None:
        self._loop.call_soon_threadsafe(self._rank.chunk_dropped, header)

    def chunk_refused(self, header: Chunk, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._rank.chunk_refused, header, reason)

    def test_verified(self, header: Chunk, is_right: bool) -> None:
        self._loop.call_soon_threadsafe(self._rank.test_verified, header, is_right)

    def unbound(self, transfer: TransferId) -> None:
        self._loop.call_soon_threadsafe(self._rank.unbound, transfer)

    def link_fenced(self, link_no: int) -> None:
        self._loop.call_soon_threadsafe(self._rank.link_fenced, link_no)
