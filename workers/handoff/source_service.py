"""The source side of a worker: takes PREFILL calls, has the engine compute them, and its ranks ship their KV.

Runs on the worker's loop, at rank 0: the shell between the channels of sinks, the ranks, and the transfers
(outgoing_transfers.py).
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import get_args

from pdserve.cluster.base.errors import ConfigError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.rank_messages import (
    AddPair,
    ChunkCredited,
    ChunkLeft,
    ChunkUnreadable,
    DropPair,
    HandoffReport,
    LinkMessage,
    LinkRelay,
    PairBroken,
    RankCount,
    RankState,
    StepReleased,
    StreamUsable,
)
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import (
    Commit,
    Hello,
    HelloOk,
    Prefill,
    Progress,
    Refuse,
    TransferAbort,
)
from pdserve.cluster.base.wire import Channel
from pdserve.workers.engine.engine import Engine
from pdserve.workers.handoff.exports import RankExporter
from pdserve.workers.handoff.outgoing_transfers import EngineInbox, OutgoingTransfers
from pdserve.workers.handoff.settings import PROGRESS_S, TICK_S, HandoffSettings, RankPort
from pdserve.workers.handoff.sink_connection import SinkConnection

logger = logging.getLogger(__name__)

LINK_MESSAGES = get_args(LinkMessage)


class SourceService:
    """Made for every worker that computes prefills for others."""

    def __init__(
        self,
        engine: Engine,
        inbox: EngineInbox,
        settings: HandoffSettings,
        metrics: TransferMetrics,
        ranks: Sequence[RankPort],
        exporters: Sequence[RankExporter],
    ) -> None:
        """`ranks` are the worker's, in order; `exporters` those of the ranks in this process."""
        self._ranks = ranks
        self._inbox = inbox
        self._settings = settings
        self._metrics = metrics
        self._sinks: dict[Channel, SinkConnection] = {}
        self._sink_numbers = count(1)
        self._transfers = OutgoingTransfers(engine, inbox, settings, metrics, ranks, exporters)
        self._tasks = BackgroundTasks("the source")
        self._watcher: asyncio.Task[None] | None = None
        self._num_ticks = 0

    async def start(self) -> None:
        """Begin to watch deadlines."""
        self._watcher = self._tasks.start(self._watch(), name="source deadlines")

    async def stop(self) -> None:
        """Close every link. Transfers that run end without a word: their channels close."""
        for channel in list(self._sinks):
            self.channel_closed(channel)
        if self._watcher is not None:
            self._watcher.cancel()
        await self._tasks.wait()

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def is_idle(self) -> bool:
        """True if no transfer, export, waiting or outstanding chunk is left (I16)."""
        return self._transfers.is_idle and all(rank.is_idle for rank in self._ranks)

    # Channels.

    def message_received(self, channel: Channel, message: Message) -> bool:
        """Take a message of a sink; False if it is none. A sink that breaks the protocol loses its channel."""
        if isinstance(message, Hello):
            self._hello(channel, message)
            return True
        sink = self._sinks.get(channel)
        if sink is None:
            return False
        try:
            match message:
                case Prefill():
                    self._transfers.begin(sink, message)
                case Commit(transfer=transfer):
                    self._transfers.committed(sink, transfer)
                case TransferAbort(transfer=transfer):
                    self._transfers.aborted(sink, transfer)
                case _ if isinstance(message, LINK_MESSAGES):
                    rank = self._ranks[sink.rank_of(message)]
                    rank.post(LinkRelay(pair_no=sink.pair_no, message=message))
                case _:
                    return False
        except ProtocolError as error:
            self._protocol_broken(sink, str(error))
        return True

    def channel_closed(self, channel: Channel) -> None:
        """The sink is gone: its links are fenced, its transfers end (I11)."""
        sink = self._sinks.pop(channel, None)
        if sink is None:
            return
        for rank in self._ranks:
            rank.post(DropPair(pair_no=sink.pair_no, reason="its channel closed"))
        self._transfers.sink_lost(sink)

    def _hello(self, channel: Channel, message: Hello) -> None:
        if channel in self._sinks:
            channel.close("protocol error: HELLO twice")
            return
        settings = self._settings
        refusal = settings.layout.refusal(message.kv)
        if refusal is None:
            try:
                sink = SinkConnection(next(self._sink_numbers), channel, message, settings)
            except ConfigError as error:
                refusal = str(error)
        if refusal is not None:
            logger.warning("worker_id=%s refused: %s", message.worker_id, refusal)
            channel.post(Refuse(reason=refusal))
            return
        self._sinks[channel] = sink
        pair = AddPair(pair_no=sink.pair_no, worker_id=sink.worker_id, incarnation=sink.incarnation, kv=message.kv)
        for rank in self._ranks:
            rank.post(pair)
        sink.post(
            HelloOk(
                worker_id=settings.worker_id,
                incarnation=settings.incarnation,
                kv=settings.layout,
                numerics_digest=settings.numerics_digest,
            )
        )

    # From the ranks.

    def reported(self, report: HandoffReport) -> None:
        """A rank reports; on the loop."""
        match report:
            case LinkRelay(pair_no=pair_no, message=message):
                sink = self._sink(pair_no)
                if sink is not None:
                    sink.post(message)
            case StreamUsable(pair_no=pair_no, stream_no=stream_no, is_usable=is_usable):
                sink = self._sink(pair_no)
                if sink is not None:
                    sink.stream_usable(stream_no, is_usable)
            case PairBroken(pair_no=pair_no, reason=reason):
                sink = self._sink(pair_no)
                if sink is not None:
                    self._protocol_broken(sink, reason)
            case ChunkLeft():
                self._transfers.chunk_left(report)
            case ChunkCredited():
                self._transfers.chunk_credited(report)
            case ChunkUnreadable():
                self._transfers.chunk_unreadable(report)
            case StepReleased():
                self._transfers.step_released(report)
            case RankCount(counter=counter):
                self._metrics.count(counter)
            case RankState():
                return  # of a rank of this process, which is asked itself
            case _:
                raise ProtocolError(f"{type(report).__name__} is no report of a source's rank")

    def _sink(self, pair_no: int) -> SinkConnection | None:
        return next((sink for sink in self._sinks.values() if sink.pair_no == pair_no), None)

    def _protocol_broken(self, sink: SinkConnection, reason: str) -> None:
        logger.warning("worker_id=%s broke the hand-off protocol: %s", sink.worker_id, reason)
        sink.channel.close(f"protocol error: {reason}")

    # The engine.

    def take(self, deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
        """Keep the tokens of prefills; return the others."""
        return self._transfers.take(deltas)

    def refused(self, request: Request, error: Exception) -> bool:
        """The engine did not take a prefill; False if the request is none."""
        return self._transfers.refused(request, error)

    def fail_all(self, cause: str) -> None:
        """The engine failed."""
        self._transfers.fail_all(cause)

    # Deadlines and progress.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            # One check that fails does not cost the others (I6).
            for transfer, limit_s in self._transfers.overdue():
                self._tasks.guarded(self._transfers.fail_overdue, transfer, limit_s)
            self._num_ticks += 1
            if self._num_ticks % round(PROGRESS_S / TICK_S) == 0:
                self._tasks.guarded(self._post_progress)

    def _post_progress(self) -> None:
        load = self._inbox.load()
        for sink in self._sinks.values():
            transfers = self._transfers.progress_of(sink)
            if transfers:
                progress = Progress(
                    transfers=transfers,
                    num_engine_tokens=load.num_prefilled_tokens + load.num_generated_tokens,
                    predicted_step_s=load.predicted_step_s,
                )
                sink.post(progress)

    def refresh_gauges(self) -> None:
        """Set the gauges of the source side."""
        num_lent = sum(rank.num_lent_slots for rank in self._ranks)
        self._metrics.slots_lent.set(num_lent)
        self._metrics.slots_free.set(len(self._ranks) * self._settings.config.max_slots - num_lent)
        self._metrics.sending.set(len(self._transfers))
