"""The source side of a worker: takes PREFILL calls, has the engine compute them, and its ranks ship their KV.

Runs on the worker's loop, at rank 0. What a transfer does is decided by SourceTransfer, how chunks leave is the ranks'
business; this is the shell between channels, engine thread and ranks.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, get_args

from pdserve.cluster.base.errors import ConfigError, InvalidRequestError, ProtocolError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.rank_messages import (
    AddPair,
    ChunkCredited,
    ChunkLeft,
    ChunkUnreadable,
    DropExport,
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
    Accept,
    Commit,
    Final,
    FirstToken,
    Hello,
    HelloOk,
    Prefill,
    Progress,
    Refuse,
    Reject,
    TransferAbort,
    TransferId,
    TransferProgress,
)
from pdserve.cluster.base.wire import Channel
from pdserve.cluster.base.worker_info import WorkerLoad
from pdserve.kvtransfer.reaper import Reaper
from pdserve.kvtransfer.source import (
    SendAbort,
    SendFinal,
    SendFirstToken,
    SourceInstruction,
    SourceState,
    SourceTransfer,
)
from pdserve.workers.engine.engine import Engine
from pdserve.workers.handoff.export_book import Export, ExportBook
from pdserve.workers.handoff.exports import RankExporter
from pdserve.workers.handoff.settings import PROGRESS_S, TICK_S, HandoffSettings, RankPort
from pdserve.workers.handoff.sink_connection import SinkConnection

logger = logging.getLogger(__name__)

LINK_MESSAGES = get_args(LinkMessage)


class EngineInbox(Protocol):
    """What the service asks of the engine thread."""

    def submit(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Run a request."""

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request."""

    def load(self) -> WorkerLoad:
        """Return the present load."""


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """One transfer at its source."""

    transfer: TransferId
    request_id: RequestId
    """What the engine knows it by: two sinks may use one request id."""
    sink: SinkConnection
    export: Export
    machine: SourceTransfer = field(default_factory=SourceTransfer)
    arrival_time: float
    start_time: float = 0.0
    end_time: float | None = None
    num_bytes: int = 0
    early_bytes: int = 0
    stall_s: float = 0.0


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
        self._engine = engine
        self._ranks = ranks
        self._inbox = inbox
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[Channel, SinkConnection] = {}
        self._sink_numbers = count(1)
        self._transfers: dict[TransferId, _Outgoing] = {}
        self._by_request: dict[RequestId, _Outgoing] = {}
        self._reaper: Reaper[TransferId] = Reaper(settings.clock)
        self._book = ExportBook(settings.layout, engine.pool, exporters, on_start=self._on_start)
        engine.exports = self._book
        self._tasks = BackgroundTasks("the source")
        self._watcher: asyncio.Task[None] | None = None
        self._num_ticks = 0
        self._failure: str | None = None

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
        is_empty = not self._transfers and not len(self._book) and not len(self._reaper)
        return is_empty and all(rank.is_idle for rank in self._ranks)

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
                    self._prefill(sink, message)
                case Commit(transfer=transfer) if self._is_from(sink, transfer):
                    self._with(transfer, lambda outgoing: outgoing.machine.committed())
                case TransferAbort(transfer=transfer) if self._is_from(sink, transfer):
                    self._with(transfer, lambda outgoing: outgoing.machine.aborted())
                case Commit() | TransferAbort():
                    self._metrics.stale.inc()
                case _ if isinstance(message, LINK_MESSAGES):
                    rank = self._ranks[sink.rank_of(message)]
                    rank.post(LinkRelay(pair_no=sink.pair_no, message=message))
                case _:
                    return False
        except ProtocolError as error:
            self._protocol_broken(sink, str(error))
        return True

    def _is_from(self, sink: SinkConnection, transfer: TransferId) -> bool:
        outgoing = self._transfers.get(transfer)
        return outgoing is not None and outgoing.sink is sink

    def channel_closed(self, channel: Channel) -> None:
        """The sink is gone: its links are fenced, its transfers end (I11)."""
        sink = self._sinks.pop(channel, None)
        if sink is None:
            return
        for rank in self._ranks:
            rank.post(DropPair(pair_no=sink.pair_no, reason="its channel closed"))
        for outgoing in [item for item in self._transfers.values() if item.sink is sink]:
            self._execute(outgoing, outgoing.machine.aborted())

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
                self._chunk_left(report)
            case ChunkCredited():
                self._chunk_credited(report)
            case ChunkUnreadable(transfer=transfer, reason=reason):
                # Without the chunk there is no FINAL.
                failure = reason
                self._with(transfer, lambda outgoing: outgoing.machine.failed(failure))
            case StepReleased(transfer=transfer, end_token=end_token):
                self._book.released(transfer, end_token)
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

    def _chunk_left(self, report: ChunkLeft) -> None:
        self._metrics.sent_bytes.inc(report.num_bytes)
        outgoing = self._transfers.get(report.transfer)
        if outgoing is None:
            return
        if report.is_first:
            outgoing.num_bytes += report.num_bytes
            outgoing.stall_s += report.stall_s
        self._execute(outgoing, outgoing.machine.chunk_sent(is_first=report.is_first))

    def _chunk_credited(self, report: ChunkCredited) -> None:
        outgoing = self._transfers.get(report.transfer)
        if outgoing is None:
            self._metrics.stale.inc()
            return
        if outgoing.end_time is None:
            outgoing.early_bytes += report.num_bytes
        self._execute(outgoing, outgoing.machine.chunk_credited())

    # Transfers.

    def _prefill(self, sink: SinkConnection, message: Prefill) -> None:
        transfer, request = message.transfer, message.request
        refusal = self._refusal(sink, message)
        if refusal is not None:
            sink.post(Reject(transfer=transfer, reason=refusal))
            return
        request_id = RequestId(f"{transfer.request_id}/{transfer.attempt}/{transfer.transfer_no}@{transfer.sink}")
        export = Export(
            transfer=transfer,
            num_tokens=len(request.prompt_token_ids) + len(request.resume_token_ids),
            pair_no=sink.pair_no,
            num_sink_tokens=message.num_tokens_held,
            plan=sink.plan if message.needs_kv else None,
        )
        outgoing = _Outgoing(
            transfer=transfer,
            request_id=request_id,
            sink=sink,
            export=export,
            arrival_time=self._settings.clock.now(),
        )
        position = self._num_queued
        self._transfers[transfer] = outgoing
        self._by_request[request_id] = outgoing
        self._reaper.watch(transfer, message.deadline_s)
        self._book.add(request_id, export)
        self._inbox.submit(
            replace(request, request_id=request_id, attempt=transfer.attempt),
            is_prefill_only=True,
        )
        if position:
            sink.post(Accept(transfer=transfer, position=position))

    def _refusal(self, sink: SinkConnection, message: Prefill) -> str | None:
        transfer = message.transfer
        if self._failure is not None:
            return f"the engine failed: {self._failure}"
        if transfer.source != self._settings.incarnation or transfer.sink != sink.incarnation:
            self._metrics.stale.inc()
            return "the transfer names another life of this pair"
        if transfer in self._transfers:
            return "this transfer is already here"
        if message.needs_kv and not sink.is_ready:
            return "not every link is open"
        if message.num_tokens_held < 0 or not 0 < message.deadline_s < math.inf:
            return "num_tokens_held and deadline_s must not be negative, nor infinite"
        try:
            self._engine.scheduler.check(message.request, is_prefill_only=True)
        except InvalidRequestError as error:
            return str(error)
        return None

    @property
    def _num_queued(self) -> int:
        return sum(item.machine.state is SourceState.QUEUED for item in self._transfers.values())

    def take(self, deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
        """Keep the tokens of prefills; return the others."""
        others = []
        for delta in deltas:
            outgoing = self._by_request.get(delta.request_id)
            if outgoing is None:
                others.append(delta)
                continue
            outgoing.end_time = self._settings.clock.now()
            outgoing.export.num_computed = outgoing.export.num_tokens
            self._execute(
                outgoing,
                outgoing.machine.prefilled(delta, sum(outgoing.export.num_chunks)),
            )
        return others

    def refused(self, request: Request, error: Exception) -> bool:
        """The engine did not take a prefill; False if the request is none."""
        outgoing = self._by_request.get(request.request_id)
        if outgoing is None:
            return False
        outgoing.sink.post(Reject(transfer=outgoing.transfer, reason=str(error)))
        self._execute(outgoing, outgoing.machine.aborted())
        return True

    def fail_all(self, cause: str) -> None:
        """The engine failed: every transfer ends with the cause; what sinks have verified stays theirs (I13)."""
        self._failure = cause
        for outgoing in list(self._transfers.values()):
            self._execute(outgoing, outgoing.machine.failed(f"the engine failed: {cause}"))

    def _with(self, transfer: TransferId, act: "_Act") -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            self._metrics.stale.inc()
        else:
            self._execute(outgoing, act(outgoing))

    def _execute(self, outgoing: _Outgoing, instructions: list[SourceInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendFirstToken(token=token):
                    outgoing.sink.post(FirstToken(transfer=outgoing.transfer, token=token))
                    if token.finish_reason is not None:
                        self._stop_shipping(outgoing)  # the sink has its ending
                case SendFinal():
                    outgoing.sink.post(self._final(outgoing))
                case SendAbort(reason=reason):
                    outgoing.sink.post(TransferAbort(transfer=outgoing.transfer, reason=reason))
                case _:
                    self._forget(outgoing)

    def _final(self, outgoing: _Outgoing) -> Final:
        assert outgoing.end_time is not None, "FINAL follows the first token"
        return Final(
            transfer=outgoing.transfer,
            num_chunks=tuple(outgoing.export.num_chunks) or (0,) * outgoing.sink.num_streams,
            num_bytes=outgoing.num_bytes,
            early_bytes=outgoing.early_bytes,
            queue_s=outgoing.start_time - outgoing.arrival_time,
            prefill_s=outgoing.end_time - outgoing.start_time,
            stall_s=outgoing.stall_s,
        )

    def _forget(self, outgoing: _Outgoing) -> None:
        del self._transfers[outgoing.transfer]
        del self._by_request[outgoing.request_id]
        self._reaper.forget(outgoing.transfer)
        self._stop_shipping(outgoing)
        self._book.remove(outgoing.request_id)
        if outgoing.end_time is None:
            self._inbox.abort(outgoing.request_id, outgoing.transfer.attempt)
        self._metrics.sent.labels(outgoing.machine.state.value).inc()

    def _stop_shipping(self, outgoing: _Outgoing) -> None:
        if self._book.void(outgoing.export):
            for rank in self._ranks:
                rank.post(DropExport(transfer=outgoing.transfer, last_end=outgoing.export.sent_until))

    # From the engine thread.

    def _on_start(self, transfer: TransferId) -> None:
        self._loop.call_soon_threadsafe(self._started, transfer)

    def _started(self, transfer: TransferId) -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            outgoing.start_time = self._settings.clock.now()
            outgoing.sink.post(Accept(transfer=transfer, position=0))
            self._execute(outgoing, outgoing.machine.started())

    # Deadlines and progress.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            # One check that fails does not cost the others (I6).
            for transfer, limit_s in self._reaper.overdue():
                self._tasks.guarded(self._fail_overdue, transfer, limit_s)
            self._num_ticks += 1
            if self._num_ticks % round(PROGRESS_S / TICK_S) == 0:
                self._tasks.guarded(self._post_progress)

    def _fail_overdue(self, transfer: TransferId, limit_s: float) -> None:
        self._with(transfer, lambda outgoing: outgoing.machine.failed(f"not done in {limit_s:g} s"))

    def _post_progress(self) -> None:
        load = self._inbox.load()
        queued = [item for item in self._transfers.values() if item.machine.state is SourceState.QUEUED]
        positions = {item.transfer: place + 1 for place, item in enumerate(queued)}
        for sink in self._sinks.values():
            mine = tuple(
                TransferProgress(
                    transfer=item.transfer,
                    position=positions.get(item.transfer, 0),
                    num_computed_tokens=item.export.num_computed,
                    num_sent_chunks=item.machine.num_sent,
                )
                for item in self._transfers.values()
                if item.sink is sink
            )
            if mine:
                progress = Progress(
                    transfers=mine,
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


class _Act(Protocol):
    def __call__(self, outgoing: _Outgoing) -> list[SourceInstruction]:
        """Apply an event to a transfer's machine."""
