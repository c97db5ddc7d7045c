"""The transfers of a source: each prefill that was asked for, until the sink has it or nobody wants it any more.

Runs on the worker's loop, at rank 0. What a transfer does is decided by SourceTransfer, which step ships what by the
book, how chunks leave by the ranks; here are the engine, the deadlines, and what the ranks report of chunks.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.rank_messages import ChunkCredited, ChunkLeft, ChunkUnreadable, DropExport, StepReleased
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.transfer_messages import (
    Accept,
    Final,
    FirstToken,
    Prefill,
    Reject,
    TransferAbort,
    TransferId,
    TransferProgress,
)
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
from pdserve.workers.handoff.settings import HandoffSettings, RankPort
from pdserve.workers.handoff.sink_connection import SinkConnection


class EngineInbox(Protocol):
    """What the service asks of the engine thread."""

    def submit(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Run a request."""

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request."""

    def load(self) -> WorkerLoad:
        """Return the present load."""


@dataclass(slots=True, kw_only=True)
class Outgoing:
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


class OutgoingTransfers:
    """Every transfer that has not ended, and the prefills that the engine computes for them."""

    def __init__(
        self,
        engine: Engine,
        inbox: EngineInbox,
        settings: HandoffSettings,
        metrics: TransferMetrics,
        ranks: Sequence[RankPort],
        exporters: Sequence[RankExporter],
    ) -> None:
        """See SourceService."""
        self._engine = engine
        self._ranks = ranks
        self._inbox = inbox
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[TransferId, Outgoing] = {}
        self._by_request: dict[RequestId, Outgoing] = {}
        self._reaper: Reaper[TransferId] = Reaper(settings.clock)
        self._book = ExportBook(settings.layout, engine.pool, exporters, on_start=self._on_start)
        engine.exports = self._book
        self._failure: str | None = None

    def __len__(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def is_idle(self) -> bool:
        """True if no transfer and no export is left (I16)."""
        return not self._transfers and not len(self._book) and not len(self._reaper)

    # Messages of sinks.

    def begin(self, sink: SinkConnection, message: Prefill) -> None:
        """A sink wants a prompt computed; refused with a REJECT that says why."""
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
        outgoing = Outgoing(
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

    def committed(self, sink: SinkConnection, transfer: TransferId) -> None:
        """The sink has it all."""
        self._with_of(sink, transfer, lambda outgoing: outgoing.machine.committed())

    def aborted(self, sink: SinkConnection, transfer: TransferId) -> None:
        """The sink does not want it any more."""
        self._with_of(sink, transfer, lambda outgoing: outgoing.machine.aborted())

    def sink_lost(self, sink: SinkConnection) -> None:
        """The sink is gone: its transfers end (I11)."""
        for outgoing in [item for item in self._transfers.values() if item.sink is sink]:
            self._execute(outgoing, outgoing.machine.aborted())

    def _with_of(self, sink: SinkConnection, transfer: TransferId, act: "_Act") -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.sink is not sink:
            self._metrics.stale.inc()
        else:
            self._execute(outgoing, act(outgoing))

    # Reports of ranks.

    def chunk_left(self, report: ChunkLeft) -> None:
        """A chunk is on its way."""
        self._metrics.sent_bytes.inc(report.num_bytes)
        outgoing = self._transfers.get(report.transfer)
        if outgoing is None:
            return
        if report.is_first:
            outgoing.num_bytes += report.num_bytes
            outgoing.stall_s += report.stall_s
        self._execute(outgoing, outgoing.machine.chunk_sent(is_first=report.is_first))

    def chunk_credited(self, report: ChunkCredited) -> None:
        """A chunk is verified at the sink."""
        outgoing = self._transfers.get(report.transfer)
        if outgoing is None:
            self._metrics.stale.inc()
            return
        if outgoing.end_time is None:
            outgoing.early_bytes += report.num_bytes
        self._execute(outgoing, outgoing.machine.chunk_credited())

    def chunk_unreadable(self, report: ChunkUnreadable) -> None:
        """A chunk could not be gathered: without it there is no FINAL."""
        self._with(report.transfer, lambda outgoing: outgoing.machine.failed(report.reason))

    def step_released(self, report: StepReleased) -> None:
        """A rank reads nothing more of a step."""
        self._book.released(report.transfer, report.end_token)

    # The engine.

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

    def _execute(self, outgoing: Outgoing, instructions: list[SourceInstruction]) -> None:
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

    def _final(self, outgoing: Outgoing) -> Final:
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

    def _forget(self, outgoing: Outgoing) -> None:
        del self._transfers[outgoing.transfer]
        del self._by_request[outgoing.request_id]
        self._reaper.forget(outgoing.transfer)
        self._stop_shipping(outgoing)
        self._book.remove(outgoing.request_id)
        if outgoing.end_time is None:
            self._inbox.abort(outgoing.request_id, outgoing.transfer.attempt)
        self._metrics.sent.labels(outgoing.machine.state.value).inc()

    def _stop_shipping(self, outgoing: Outgoing) -> None:
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

    def overdue(self) -> list[tuple[TransferId, float]]:
        """Return the transfers whose time is over, and how much they had, in seconds."""
        return list(self._reaper.overdue())

    def fail_overdue(self, transfer: TransferId, limit_s: float) -> None:
        """End a transfer whose time is over."""
        self._with(transfer, lambda outgoing: outgoing.machine.failed(f"not done in {limit_s:g} s"))

    def progress_of(self, sink: SinkConnection) -> tuple[TransferProgress, ...]:
        """Return how far each transfer of a sink is."""
        queued = [item for item in self._transfers.values() if item.machine.state is SourceState.QUEUED]
        positions = {item.transfer: place + 1 for place, item in enumerate(queued)}
        return tuple(
            TransferProgress(
                transfer=item.transfer,
                position=positions.get(item.transfer, 0),
                num_computed_tokens=item.export.num_computed,
                num_sent_chunks=item.machine.num_sent,
            )
            for item in self._transfers.values()
            if item.sink is sink
        )


class _Act(Protocol):
    def __call__(self, outgoing: Outgoing) -> list[SourceInstruction]:
        """Apply an event to a transfer's machine."""
