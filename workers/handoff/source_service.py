"""The source side of a worker: takes PREFILL calls, has the engine compute them, ships their KV.

Runs on the worker's loop. What a transfer does is decided by SourceTransfer, how chunks leave by ChunkSender; this is
the shell between channels, engine thread and links.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError, InvalidRequestError, ProtocolError
from pdserve.cluster.base.ids import Incarnation, RequestId, WorkerId
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.transfer_messages import (
    Accept,
    Chunk,
    CloseLink,
    Commit,
    Credit,
    Final,
    FirstToken,
    Hello,
    HelloOk,
    LinkAttached,
    Nack,
    OpenLink,
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
from pdserve.kvtransfer.link import LinkEvent, LinkState
from pdserve.kvtransfer.reaper import Reaper
from pdserve.kvtransfer.slots import SlotPool
from pdserve.kvtransfer.source import (
    SendAbort,
    SendFinal,
    SendFirstToken,
    SourceInstruction,
    SourceState,
    SourceTransfer,
)
from pdserve.kvtransfer.transports.tcp import TcpListener
from pdserve.workers.engine.engine import Engine
from pdserve.workers.handoff.exports import Export, KVExporter
from pdserve.workers.handoff.outgoing_link import OutgoingLink
from pdserve.workers.handoff.settings import GIVE_BACK_S, PROGRESS_S, TICK_S, HandoffSettings

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0
STALLED_LIMIT = 3.0
"""A link that stalls for this many times `stall_s` is given up: the sink opens another one."""


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
    channel: Channel
    link: OutgoingLink | None
    export: Export
    machine: SourceTransfer = field(default_factory=SourceTransfer)
    arrival_time: float
    start_time: float = 0.0
    end_time: float | None = None
    num_bytes: int = 0
    early_bytes: int = 0
    stall_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Sink:
    """A decode worker that said HELLO on a channel."""

    worker_id: WorkerId
    incarnation: Incarnation
    links: dict[int, OutgoingLink] = field(default_factory=dict)


class SourceService:
    """Made for every worker that computes prefills for others."""

    def __init__(self, engine: Engine, inbox: EngineInbox, settings: HandoffSettings, metrics: TransferMetrics) -> None:
        self._engine = engine
        self._inbox = inbox
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._listener = TcpListener(settings.channel.token)
        self._slots = SlotPool(settings.config.max_slots)
        self._sinks: dict[Channel, _Sink] = {}
        self._transfers: dict[TransferId, _Outgoing] = {}
        self._by_request: dict[RequestId, _Outgoing] = {}
        self._reaper: Reaper[TransferId] = Reaper(settings.clock)
        self._exporter = KVExporter(
            settings.copier, engine.pool, slot_bytes=settings.config.slot_bytes, on_start=self._on_start
        )
        engine.exports = self._exporter
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._num_ticks = 0
        self._failure: str | None = None

    async def start(self) -> None:
        """Listen for data connections and begin to watch deadlines."""
        await self._listener.start(self._settings.host)
        self._watcher = asyncio.create_task(self._watch(), name="source deadlines")
        self._keep(self._watcher)

    async def stop(self) -> None:
        """Close every link. Transfers that run end without a word: their channels close."""
        for channel in list(self._sinks):
            self.channel_closed(channel)
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.stop()

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    @property
    def num_slots_lent(self) -> int:
        """Slots that links hold."""
        return self._slots.num_lent

    @property
    def is_idle(self) -> bool:
        """True if no transfer, export or outstanding chunk is left (I16)."""
        outstanding = sum(link.sender.num_outstanding for sink in self._sinks.values() for link in sink.links.values())
        return not self._transfers and not len(self._exporter) and outstanding == 0 and not len(self._reaper)

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
                case OpenLink(link_no=link_no, transport=transport):
                    self._open_link(channel, sink, link_no, transport)
                case LinkAttached(link_no=link_no):
                    link = self._link(sink, link_no)
                    link.expect_test()
                    self._keep(asyncio.create_task(self._test_link(sink, link)))
                case CloseLink(link_no=link_no, reason=reason):
                    if link_no in sink.links:
                        self._close_link(sink, sink.links[link_no], reason, tell_sink=False)
                case Prefill():
                    self._prefill(channel, sink, message)
                case Credit():
                    self._credit(sink, message)
                case Nack():
                    self._nack(sink, message)
                case Commit(transfer=transfer) if self._is_from(channel, transfer):
                    self._with(transfer, lambda outgoing: outgoing.machine.committed())
                case TransferAbort(transfer=transfer) if self._is_from(channel, transfer):
                    self._with(transfer, lambda outgoing: outgoing.machine.aborted())
                case Commit() | TransferAbort():
                    self._metrics.stale.inc()
                case _:
                    return False
        except ProtocolError as error:
            logger.warning("worker_id=%s broke the hand-off protocol: %s", sink.worker_id, error)
            channel.close(f"protocol error: {error}")
        return True

    def _is_from(self, channel: Channel, transfer: TransferId) -> bool:
        outgoing = self._transfers.get(transfer)
        return outgoing is not None and outgoing.channel is channel

    def channel_closed(self, channel: Channel) -> None:
        """The sink is gone: its links are fenced, its transfers end (I11)."""
        sink = self._sinks.pop(channel, None)
        if sink is None:
            return
        for link in list(sink.links.values()):
            self._close_link(sink, link, "the sink is gone", tell_sink=False)
        for outgoing in [item for item in self._transfers.values() if item.channel is channel]:
            self._execute(outgoing, outgoing.machine.aborted())

    def _hello(self, channel: Channel, message: Hello) -> None:
        if channel in self._sinks:
            channel.close("protocol error: HELLO twice")
            return
        difference = self._settings.layout.difference(message.kv)
        if difference is not None:
            logger.warning("worker_id=%s refused: %s", message.worker_id, difference)
            self._post(channel, Refuse(reason=difference))
            return
        self._sinks[channel] = _Sink(worker_id=message.worker_id, incarnation=message.incarnation)
        settings = self._settings
        self._post(
            channel,
            HelloOk(
                worker_id=settings.worker_id,
                incarnation=settings.incarnation,
                kv=settings.layout,
                numerics_digest=settings.numerics_digest,
            ),
        )

    # Links.

    def _open_link(self, channel: Channel, sink: _Sink, link_no: int, transport: str) -> None:
        if link_no in sink.links:
            raise ProtocolError(f"link {link_no} is open already")
        events = _LinkEvents(self, channel, link_no)
        try:
            link = OutgoingLink(link_no, transport, channel, self._settings, self._slots, self._listener, events)
        except (ProtocolError, OSError) as error:
            self._post(channel, CloseLink(link_no=link_no, reason=str(error)))
            return
        sink.links[link_no] = link
        self._post(channel, link.offer(self._settings))

    def _link(self, sink: _Sink, link_no: int) -> OutgoingLink:
        link = sink.links.get(link_no)
        if link is None:
            raise ProtocolError(f"link {link_no} is not open")
        return link

    async def _test_link(self, sink: _Sink, link: OutgoingLink) -> None:
        try:
            await link.begin_test()
        except OSError as error:
            if link.link_no in sink.links:
                self._close_link(sink, link, str(error), tell_sink=True)

    def _close_link(self, sink: _Sink, link: OutgoingLink, reason: str, *, tell_sink: bool) -> None:
        del sink.links[link.link_no]
        logger.info("worker_id=%s link_no=%d closed: %s", sink.worker_id, link.link_no, reason)
        link.break_off()
        self._metrics.fences.inc()
        if tell_sink:
            self._post(link.channel, CloseLink(link_no=link.link_no, reason=reason))
        for transfer in list(link.transfers):
            self._with(transfer, lambda outgoing: outgoing.machine.failed(f"link closed: {reason}"))
        self._keep(asyncio.create_task(link.fence()))

    def _credit(self, sink: _Sink, message: Credit) -> None:
        link = sink.links.get(message.link_no)
        if link is None or link.sender.is_closing:
            self._metrics.stale.inc()  # it was on its way when the link closed
            return
        header = link.sender.credited(message.seq, message.slot)
        link.used_time = self._settings.clock.now()
        if header.transfer is None:
            link.life.apply(LinkEvent.TESTED)
            return
        if link.life.state is not LinkState.TESTING:
            link.life.apply(LinkEvent.CREDITED)
        outgoing = self._transfers.get(header.transfer)
        if outgoing is None:
            self._metrics.stale.inc()
            return
        if outgoing.end_time is None:
            outgoing.early_bytes += header.num_bytes
        self._execute(outgoing, outgoing.machine.chunk_credited())

    def _nack(self, sink: _Sink, message: Nack) -> None:
        link = sink.links.get(message.link_no)
        if link is not None and not link.sender.is_closing:
            self._metrics.nacks.inc()
            logger.warning("worker_id=%s refused chunk %d: %s", sink.worker_id, message.seq, message.reason)
            link.sender.refused(message.seq, message.slot)

    # Transfers.

    def _prefill(self, channel: Channel, sink: _Sink, message: Prefill) -> None:
        transfer, request = message.transfer, message.request
        refusal = self._refusal(sink, message)
        if refusal is not None:
            self._post(channel, Reject(transfer=transfer, reason=refusal))
            return
        link = sink.links[message.link_no] if message.needs_kv else None
        request_id = RequestId(f"{transfer.request_id}/{transfer.attempt}/{transfer.transfer_no}@{transfer.sink}")
        export = Export(
            transfer=transfer,
            num_tokens=len(request.prompt_token_ids) + len(request.resume_token_ids),
            num_held=message.num_tokens_held,
            sender=None if link is None else link.sender,
        )
        outgoing = _Outgoing(
            transfer=transfer,
            request_id=request_id,
            channel=channel,
            link=link,
            export=export,
            arrival_time=self._settings.clock.now(),
        )
        if link is not None:
            link.transfers.add(transfer)
        position = self._num_queued
        self._transfers[transfer] = outgoing
        self._by_request[request_id] = outgoing
        self._reaper.watch(transfer, message.deadline_s)
        self._exporter.add(request_id, export)
        self._inbox.submit(
            Request(
                request_id=request_id,
                attempt=transfer.attempt,
                prompt_token_ids=request.prompt_token_ids,
                resume_token_ids=request.resume_token_ids,
                sampling=request.sampling,
            ),
            is_prefill_only=True,
        )
        if position:
            self._post(channel, Accept(transfer=transfer, position=position))

    def _refusal(self, sink: _Sink, message: Prefill) -> str | None:
        transfer = message.transfer
        if self._failure is not None:
            return f"the engine failed: {self._failure}"
        if transfer.source != self._settings.incarnation or transfer.sink != sink.incarnation:
            self._metrics.stale.inc()
            return "the transfer names another life of this pair"
        if transfer in self._transfers:
            return "this transfer is already here"
        if message.needs_kv:
            link = sink.links.get(message.link_no)
            if link is None or not link.life.is_usable:
                return f"link {message.link_no} is not open"
        if message.num_tokens_held < 0 or message.deadline_s <= 0:
            return "num_tokens_held and deadline_s must not be negative"
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
                outgoing.machine.prefilled(delta.token_ids[0], delta.finish_reason, outgoing.export.num_chunks),
            )
        return others

    def refused(self, request: Request, error: Exception) -> bool:
        """The engine did not take a prefill; False if the request is none."""
        outgoing = self._by_request.get(request.request_id)
        if outgoing is None:
            return False
        self._post(outgoing.channel, Reject(transfer=outgoing.transfer, reason=str(error)))
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
                case SendFirstToken(token_id=token_id, finish_reason=reason):
                    self._post(
                        outgoing.channel,
                        FirstToken(transfer=outgoing.transfer, token_id=token_id, finish_reason=reason),
                    )
                    if reason is not None:
                        outgoing.export.is_void = True  # the sink has its ending: stop sending
                case SendFinal(num_chunks=num_chunks):
                    self._post(outgoing.channel, self._final(outgoing, num_chunks))
                case SendAbort(reason=reason):
                    self._post(outgoing.channel, TransferAbort(transfer=outgoing.transfer, reason=reason))
                case _:
                    self._forget(outgoing)

    def _final(self, outgoing: _Outgoing, num_chunks: int) -> Final:
        assert outgoing.end_time is not None, "FINAL follows the first token"
        return Final(
            transfer=outgoing.transfer,
            num_chunks=num_chunks,
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
        self._exporter.remove(outgoing.request_id)
        if outgoing.link is not None:
            outgoing.link.transfers.discard(outgoing.transfer)
            outgoing.link.sender.drop_void()
        if outgoing.end_time is None:
            self._inbox.abort(outgoing.request_id, outgoing.transfer.attempt)
        self._metrics.sent.labels(outgoing.machine.state.value).inc()

    # From the engine thread and the sender threads.

    def _on_start(self, transfer: TransferId) -> None:
        self._loop.call_soon_threadsafe(self._started, transfer)

    def _started(self, transfer: TransferId) -> None:
        outgoing = self._transfers.get(transfer)
        if outgoing is not None:
            outgoing.start_time = self._settings.clock.now()
            self._post(outgoing.channel, Accept(transfer=transfer, position=0))
            self._execute(outgoing, outgoing.machine.started())

    def chunk_sent(self, channel: Channel, header: Chunk, stall_s: float) -> None:
        """A chunk left; on the loop."""
        sink = self._sinks.get(channel)
        if sink is not None and header.link_no in sink.links:
            sink.links[header.link_no].sent(header)
        if header.transfer is None:
            return
        outgoing = self._transfers.get(header.transfer)
        self._metrics.sent_bytes.inc(header.num_bytes)
        if outgoing is not None:
            if not header.num_resends:
                outgoing.num_bytes += header.num_bytes
                outgoing.stall_s += stall_s
            self._execute(outgoing, outgoing.machine.chunk_sent(is_resend=header.num_resends > 0))

    def link_broken(self, channel: Channel, link_no: int, reason: str) -> None:
        """A sender gave its link up; on the loop."""
        sink = self._sinks.get(channel)
        if sink is not None and link_no in sink.links:
            self._close_link(sink, sink.links[link_no], reason, tell_sink=True)

    # Deadlines and progress.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for transfer, limit_s in self._reaper.overdue():
                self._guarded(self._fail_overdue, transfer, limit_s)
            for sink in list(self._sinks.values()):
                for link in list(sink.links.values()):
                    self._guarded(self._check_link, sink, link)
            self._num_ticks += 1
            if self._num_ticks % round(PROGRESS_S / TICK_S) == 0:
                self._guarded(self._post_progress)

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        """The barrier of the deadline task: one check that fails does not cost the others (I6)."""
        try:
            act(*arguments)
        except Exception:
            logger.exception("a check of the source failed")

    def _fail_overdue(self, transfer: TransferId, limit_s: float) -> None:
        self._with(transfer, lambda outgoing: outgoing.machine.failed(f"not done in {limit_s:g} s"))

    def _check_link(self, sink: _Sink, link: OutgoingLink) -> None:
        config = self._settings.config
        now = self._settings.clock.now()
        if link.life.state is LinkState.OPENING:
            if now - link.used_time > OPENING_LIMIT_S:
                self._close_link(sink, link, "the sink did not attach", tell_sink=True)
            return
        stalled_s = link.sender.stalled_for()
        if stalled_s > config.stall_s:
            if link.life.state is LinkState.TESTING or stalled_s > STALLED_LIMIT * config.stall_s:
                self._close_link(sink, link, f"no credit for {stalled_s:.1f} s", tell_sink=True)
                return
            if link.life.state is not LinkState.STALLED:
                logger.warning("worker_id=%s link_no=%d stalled", sink.worker_id, link.link_no)
            link.life.apply(LinkEvent.STALLED)
            for transfer in list(link.transfers):
                self._with(transfer, lambda outgoing: outgoing.machine.failed("the link stalled"))
            return
        idle_s = now - link.used_time
        if idle_s > GIVE_BACK_S:
            link.sender.give_back_idle()
        if idle_s > config.test_interval_s and not link.sender.num_outstanding:
            link.used_time = now
            link.sender.send_test()

    def _post_progress(self) -> None:
        load = self._inbox.load()
        queued = [item for item in self._transfers.values() if item.machine.state is SourceState.QUEUED]
        positions = {item.transfer: place + 1 for place, item in enumerate(queued)}
        for channel in self._sinks:
            mine = tuple(
                TransferProgress(
                    transfer=item.transfer,
                    position=positions.get(item.transfer, 0),
                    num_computed_tokens=item.export.num_computed,
                    num_sent_chunks=item.machine.num_sent,
                )
                for item in self._transfers.values()
                if item.channel is channel
            )
            if mine:
                progress = Progress(
                    transfers=mine,
                    num_engine_tokens=load.num_prefilled_tokens + load.num_generated_tokens,
                    predicted_step_s=load.predicted_step_s,
                )
                self._post(channel, progress)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work of the source failed", exc_info=task.exception())

    def _post(self, channel: Channel, message: Message) -> None:
        try:
            channel.post(message)
        except ChannelClosedError as error:
            # channel_closed follows and ends what this channel carried.
            logger.debug("a message could not be posted: %s", error)

    def refresh_gauges(self) -> None:
        """Set the gauges of the source side."""
        self._metrics.slots_lent.set(self._slots.num_lent)
        self._metrics.slots_free.set(self._slots.capacity - self._slots.num_lent)
        self._metrics.sending.set(len(self._transfers))


class _LinkEvents:
    """Hands a sender thread's events to the loop."""

    def __init__(self, service: SourceService, channel: Channel, link_no: int) -> None:
        self._service = service
        self._channel = channel
        self._link_no = link_no
        self._loop = asyncio.get_running_loop()

    def chunk_sent(self, header: Chunk, stall_s: float) -> None:
        self._loop.call_soon_threadsafe(self._service.chunk_sent, self._channel, header, stall_s)

    def link_broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._service.link_broken, self._channel, self._link_no, reason)


class _Act(Protocol):
    def __call__(self, outgoing: _Outgoing) -> list[SourceInstruction]:
        """Apply an event to a transfer's machine."""
