"""The worker service: channels on one side, the engine thread on the other, all on one asyncio loop.

Ingresses connect to it, and decode workers if it prefills; it connects to the controller, and to prefill workers if it
decodes. It knows nothing of Ray.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.errors import ChannelClosedError, InvalidRequestError, OverloadedError, ProtocolError
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.messages import (
    Abort,
    Busy,
    Generate,
    Message,
    NotFound,
    Reclaim,
    Tokens,
)
from pdserve.cluster.base.metrics import TransferMetrics, WorkerMetrics
from pdserve.cluster.base.rank_messages import HandoffReport
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta, forks_of
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.timeline import Timelines
from pdserve.cluster.base.transfer_messages import Prefill
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role, WorkerInfo, WorkerLoad
from pdserve.workers.cache_news import CacheNews
from pdserve.workers.controller_link import ControllerLink
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.engine_thread import EngineThread, StepResult
from pdserve.workers.handoff.ranks import Gang, HandoffRanks
from pdserve.workers.handoff.settings import HandoffSettings
from pdserve.workers.handoff.sink_service import Offer, SinkService
from pdserve.workers.handoff.source_service import SourceService
from pdserve.workers.kv.copy import Copier
from pdserve.workers.live_requests import LiveRequests

logger = logging.getLogger(__name__)

RECLAIM_S = 1.0
KEEP_ENDED_S = 6.0
"""Longer than a broken connection takes to be noticed by silence."""
STOP_TIMEOUT_S = 5.0
STEP_TERMS = ("base", "per_token", "per_row", "per_context_kilotoken", "per_kilopair")
LAST_WORDS_S = 0.05
"""For what was posted to leave the process before it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the service needs to know besides its engine."""

    host: str
    channel: ChannelSettings
    transfer: TransferConfig
    copiers: tuple[Copier, ...]
    """One for each rank in this process."""
    max_waiting: int
    clock: Clock
    gang: Gang | None = None
    """The ranks in other processes."""
    end_process: Callable[[str], None] | None = None
    """Ends a worker that has lost a rank or its lease, with the cause; requests are replayed elsewhere."""
    lease_s: float | None = None
    """How long it lives without a controller and without requests; None: for ever."""


class Worker:
    """Serves one engine."""

    def __init__(
        self,
        engine: Engine,
        settings: WorkerSettings,
        describe: Callable[[Endpoint], WorkerInfo],
        resolve_controller: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        self._settings = settings
        self._describe = describe
        self._loop = asyncio.get_running_loop()
        self._live = LiveRequests(reclaim_s=RECLAIM_S, keep_s=KEEP_ENDED_S)
        self._channels: dict[int, Channel] = {}
        self._metrics = WorkerMetrics()
        self._transfer_metrics = TransferMetrics(self._metrics.registry)
        self._timelines = Timelines(settings.clock)
        self._tasks = BackgroundTasks("the worker")
        self._engine = engine
        self._source: SourceService | None = None
        self._sink: SinkService | None = None
        self._ranks: HandoffRanks | None = None
        self._counted = WorkerLoad()
        self._num_arrivals = 0
        self._is_draining = False
        self._failure: str | None = None
        self._info: WorkerInfo | None = None
        self._thread = EngineThread(engine, self._publish, self._engine_failed)
        self._server = ChannelServer(settings.channel, self)
        self._controller = ControllerLink(
            self, CacheNews(self._thread.cache_events, settings.copiers[0].layout), settings.lease_s
        )
        self._controller_client = ChannelClient(
            settings.channel, self._controller, resolve_controller, name="controller"
        )

    async def start(self) -> WorkerInfo:
        """Start the engine thread, listen, and begin to register with the controller."""
        endpoint = await self._server.start(self._settings.host)
        self._info = self._describe(endpoint)
        await self._start_handoff(self._info)
        self._thread.start()
        self._controller_client.start()
        self._controller.start_reporting()
        logger.info("worker_id=%s serves at %s:%d", self._info.worker_id, endpoint.host, endpoint.port)
        return self._info

    async def _start_handoff(self, info: WorkerInfo) -> None:
        own = self._settings
        settings = HandoffSettings(
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            numerics_digest=info.numerics_digest,
            config=own.transfer,
            channel=own.channel,
            layout=own.copiers[0].layout,
            clock=own.clock,
        )
        self._ranks = HandoffRanks(own, info, self._rank_reported)
        await self._ranks.start()
        if info.role is Role.PREFILL:
            self._source = SourceService(
                self._engine,
                self._thread,
                settings,
                self._transfer_metrics,
                self._ranks.ports,
                self._ranks.exporters,
            )
            await self._source.start()
        elif info.role is Role.DECODE:
            self._sink = SinkService(
                self._engine, self, settings, self._transfer_metrics, own.max_waiting, self._ranks.ports
            )
            await self._sink.start()

    def _rank_reported(self, report: HandoffReport) -> None:
        if self._source is not None:
            self._source.reported(report)
        elif self._sink is not None:
            self._sink.reported(report)

    async def stop(self) -> None:
        """Close every channel and end the threads."""
        await self._controller.stop_reporting()
        await self._controller_client.stop()
        if self._sink is not None:
            await self._sink.stop()
        await self._server.stop()
        if self._source is not None:
            await self._source.stop()
        if self._ranks is not None:
            await self._ranks.stop()
        if not await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT_S):
            logger.error("the engine thread did not stop within %g s", STOP_TIMEOUT_S)

    @property
    def is_unused(self) -> bool:
        """True if nobody waits for anything of this worker."""
        return not len(self._live) and self.load().is_idle

    @property
    def num_live(self) -> int:
        """Requests held now."""
        return len(self._live)

    def load(self) -> WorkerLoad:
        """Return the present load."""
        load = replace(self._thread.load(), num_arrivals=self._num_arrivals, is_draining=self._is_draining)
        if self._sink is not None:
            return replace(
                load,
                num_receiving=self._sink.num_receiving,
                links=self._sink.links(),
                transfer_fits=self._sink.transfer_fits(),
            )
        if self._source is not None:
            return replace(load, num_sending=self._source.num_transfers)
        return load

    @property
    def has_idle_handoff(self) -> bool:
        """True if no transfer, link slot or deadline is held (I16)."""
        sink_is_idle = self._sink is None or self._sink.is_idle
        return sink_is_idle and (self._source is None or self._source.is_idle)

    def announce_peers(self, workers: Sequence[WorkerInfo]) -> None:
        """These prefill workers are ready."""
        if self._sink is not None:
            self._sink.announce(workers)

    def drain(self) -> None:
        """Take no new requests; what is here goes on until it has ended, or its ingress takes it elsewhere."""
        self._is_draining = True

    def traces(self, prefix: str) -> tuple[str, ...]:
        """Return the timelines of a client request."""
        return self._timelines.matching(prefix)

    @property
    def worker_id(self) -> WorkerId:
        """The worker's name."""
        assert self._info is not None, "there is one after start"
        return self._info.worker_id

    def registration(self) -> tuple[WorkerInfo, WorkerLoad, str | None]:
        """Return who this worker is, its load, and the cause if its engine failed."""
        assert self._info is not None, "registration comes after start"
        return self._info, self.load(), self._failure

    def metrics_text(self) -> str:
        """Return the worker's metrics, gauges refreshed."""
        load = self.load()
        metrics, before = self._metrics, self._counted
        metrics.running.set(load.num_running)
        metrics.waiting.set(load.num_waiting)
        metrics.queued_prompt_tokens.set(load.num_queued_prompt_tokens)
        metrics.free_blocks.set(load.num_free_blocks)
        metrics.total_blocks.set(load.num_blocks)
        for term in STEP_TERMS:
            metrics.step_fit.labels(term).set(getattr(load.step_fit, term))
        metrics.step_error.set(load.step_fit.relative_error)
        for window, slots in self._thread.slot_use().items():
            metrics.kv_slots.labels(window, "held").set(slots.num_held)
            metrics.kv_slots.labels(window, "wasted").set(slots.num_wasted)
        metrics.cached_blocks.set(load.num_cached_blocks)
        metrics.admitted_tokens.inc(load.num_admitted_prompt_tokens - before.num_admitted_prompt_tokens)
        metrics.cached_tokens.inc(load.num_cached_prompt_tokens - before.num_cached_prompt_tokens)
        metrics.loaded_blocks.inc(load.num_loaded_blocks - before.num_loaded_blocks)
        metrics.recomputed_tokens.inc(load.num_recomputed_tokens - before.num_recomputed_tokens)
        metrics.steps.inc(load.num_steps - before.num_steps)
        metrics.preemptions.inc(load.num_preemptions - before.num_preemptions)
        metrics.prefilled_tokens.inc(load.num_prefilled_tokens - before.num_prefilled_tokens)
        metrics.sampled_tokens.inc(load.num_generated_tokens - before.num_generated_tokens)
        self._counted = load
        if self._sink is not None:
            self._sink.refresh_gauges()
        if self._source is not None:
            self._source.refresh_gauges()
        return metrics.text()

    # Channels of ingresses.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channels[id(channel)] = channel

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler: its requests wait a moment to be reclaimed."""
        del self._channels[id(channel)]
        if self._source is not None:
            self._source.channel_closed(channel)
        if self._live.channel_closed(id(channel), self._loop.time()):
            # A little later than the deadline, so that the comparison cannot miss it by rounding.
            self._loop.call_later(RECLAIM_S * 1.01, self._reap)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        self._num_arrivals += isinstance(message, Generate | Prefill)
        match message:
            case Generate():
                self._generate(channel, message)
            case Abort(request_id=request_id, attempt=attempt):
                if self._live.drop((request_id, attempt)):
                    self._stop_request(request_id, attempt)
            case Reclaim(request_id=request_id, attempt=attempt, next_index=next_index):
                missed = self._live.reclaim((request_id, attempt), id(channel), next_index)
                if missed is None:
                    self._post(channel, NotFound(request_id=request_id, attempt=attempt))
                else:
                    self._post(channel, Tokens(deltas=tuple(missed)))
            case _:
                if self._source is None or not self._source.message_received(channel, message):
                    channel.close(f"unexpected {type(message).__name__}")

    def _generate(self, channel: Channel, message: Generate) -> None:
        request = message.request
        if self._source is not None:
            self._busy(channel, request, "this worker only prefills", is_overloaded=False)
        elif self._is_draining:
            self._busy(channel, request, "this worker drains", is_overloaded=False)
        elif self._failure is not None:
            self._busy(channel, request, f"the engine failed: {self._failure}", is_overloaded=False)
        elif not self._live.add(request, id(channel)):
            self._busy(channel, request, "this attempt is already here", is_overloaded=False)
        else:
            for fork in forks_of(request):
                self._live.add(fork, id(channel))
            self._run(channel, message)

    def _run(self, channel: Channel, message: Generate) -> None:
        request = message.request
        try:
            self._engine.scheduler.check(request)
        except InvalidRequestError as error:
            self._refuse(request, error)
            return
        timeline = self._timelines.start(request.request_id, request.attempt)
        num_resumed = len(request.resume_token_ids)
        timeline.mark(f"received, {len(request.prompt_token_ids)} prompt tokens, {num_resumed} resumed")
        for fork in forks_of(request):
            self._timelines.start(fork.request_id, fork.attempt).mark(f"sample {fork.sample} of {request.request_id}")
        offer = Offer.LOCAL
        if self._sink is not None:
            may_wait = message.may_wait
            offer = self._sink.offer(request, message.prefill_worker_ids, timeline, may_wait=may_wait)
        if offer is Offer.LOCAL:
            self._thread.submit(request)
        elif offer is Offer.BUSY:
            self._drop_forks(request)
            self._live.drop((request.request_id, request.attempt))
            self._busy(channel, request, "no room for the request's KV now", is_overloaded=True)

    def _drop_forks(self, request: Request) -> None:
        for fork in forks_of(request):
            self._live.drop((fork.request_id, fork.attempt))

    def _wanted_forks(self, request: Request) -> list[Request]:
        """Return the forks of a request that nobody has aborted."""
        return [fork for fork in forks_of(request) if self._live.is_live((fork.request_id, fork.attempt))]

    def _stop_request(self, request_id: RequestId, attempt: int) -> None:
        """Nobody wants the request any more."""
        self._metrics.ended.labels(FinishReason.ABORT.value).inc()
        self._end_timeline(request_id, attempt, "aborted")
        dropped = None if self._sink is None else self._sink.abort((request_id, attempt))
        if dropped is None:
            self._thread.abort(request_id, attempt)
        else:
            self._begin_forks(dropped)

    def _end_timeline(self, request_id: RequestId, attempt: int, how: str) -> None:
        timeline = self._timelines.get(request_id, attempt)
        if timeline is not None:
            timeline.mark(how)
            logger.info("request_id=%s", timeline.line())

    # See RequestOwner: what the sink service asks.

    def join(self, request: Request, reservation: Reservation, num_computed_tokens: int) -> None:
        """Run a request whose first tokens have their KV in the reservation's blocks."""
        forks = tuple(fork.request_id for fork in self._wanted_forks(request))
        if len(forks) == len(request.forks):
            self._thread.join(request, reservation, num_computed_tokens)
            return
        # Somebody has left meanwhile; the others keep their random streams, as requests of their own.
        for fork in self._wanted_forks(request):
            self._thread.submit(fork)
        self._thread.join(replace(request, forks=()), reservation, num_computed_tokens)

    def submit(self, request: Request) -> None:
        """Run a request from its beginning."""
        self._thread.submit(request)

    def emit(self, request: Request, token: TokenDelta) -> None:
        """Send a token that a prefill worker sampled."""
        index = len(request.resume_token_ids)
        delta = replace(token, request_id=request.request_id, attempt=request.attempt, index=index)
        self._note_endings([delta])
        self._send(self._live.deliver([delta], self._loop.time()))
        if delta.finish_reason is not None:
            self._begin_forks(request)

    def _begin_forks(self, request: Request) -> None:
        """The KV of a request does not come: forks that are wanted compute the prompt themselves."""
        for fork in self._wanted_forks(request):
            self._thread.submit(fork)

    def _busy(self, channel: Channel, request: Request, reason: str, *, is_overloaded: bool) -> None:
        message = Busy(
            request_id=request.request_id, attempt=request.attempt, reason=reason, is_overloaded=is_overloaded
        )
        self._post(channel, message)

    def _reap(self) -> None:
        for request_id, attempt in self._live.reap(self._loop.time()):
            logger.info("request_id=%s nobody reclaimed it: aborted", request_id)
            self._stop_request(request_id, attempt)

    # From the engine thread.

    def _publish(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._deliver, result)

    def _engine_failed(self, cause: str) -> None:
        self._loop.call_soon_threadsafe(self._fail, cause)

    def end(self, cause: str) -> None:
        """A rank or the lease is lost: tell the controller, and end the process, without an ending for any request."""
        if self._failure is None:
            self._failure = cause
            self._controller.report_failure(cause)
            self._loop.call_later(LAST_WORDS_S, self._end_process, cause)

    def _end_process(self, cause: str) -> None:
        assert self._settings.end_process is not None, "a worker of several ranks, or with a lease, can end"
        self._settings.end_process(cause)

    async def _end_for(self, gang: Gang, failure: str) -> None:
        self.end(await gang.cause_of(failure))

    def _deliver(self, result: StepResult) -> None:
        for request, error in result.refusals:
            self._refuse(request, error)
        if result.step_s is not None:
            self._metrics.step_time.observe(result.step_s)
        for queue_s in result.queue_s:
            self._metrics.queue_time.observe(queue_s)
        deltas = result.deltas if self._source is None else self._source.take(result.deltas)
        self._note_first_steps(deltas)
        self._note_endings(deltas)
        self._send(self._live.deliver(deltas, self._loop.time()))
        if self._sink is not None:
            self._sink.admit_waiting()

    def _refuse(self, request: Request, error: Exception) -> None:
        if self._source is not None and self._source.refused(request, error):
            return
        key = (request.request_id, request.attempt)
        if isinstance(error, OverloadedError):
            channel = self._live.channel_of(key)
            self._drop_forks(request)
            self._live.drop(key)
            if channel is not None:
                self._busy(self._channels[channel], request, str(error), is_overloaded=True)
            return
        endings = [
            TokenDelta(
                request_id=refused.request_id,
                attempt=refused.attempt,
                index=len(refused.resume_token_ids),
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=str(error),
            )
            for refused in (request, *forks_of(request))
        ]
        self._note_endings(endings)
        self._send(self._live.deliver(endings, self._loop.time()))

    def _fail(self, cause: str) -> None:
        gang = self._settings.gang
        if gang is not None and self._settings.end_process is not None:
            self._tasks.start(self._end_for(gang, cause))
            return
        self._failure = cause
        self._send(self._live.fail_all(f"the engine failed: {cause}", self._loop.time()))
        if self._source is not None:
            self._source.fail_all(cause)
        if self._sink is not None:
            self._sink.fail_all(cause)
        self._controller.report_failure(cause)

    def _forget_ended(self) -> None:
        self._live.forget_ended(self._loop.time())

    def _note_first_steps(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            timeline = self._timelines.get(delta.request_id, delta.attempt)
            if timeline is not None and not timeline.is_decoding:
                timeline.is_decoding = True
                number = delta.index + 1
                timeline.mark("first token" if number == 1 else f"token {number}: decodes here")

    def _note_endings(self, deltas: Sequence[TokenDelta]) -> None:
        endings = [delta for delta in deltas if delta.finish_reason is not None]
        for delta in endings:
            assert delta.finish_reason is not None, "selected above"
            self._metrics.ended.labels(delta.finish_reason.value).inc()
            num_tokens = delta.index + len(delta.token_ids)
            self._end_timeline(delta.request_id, delta.attempt, f"ended: {delta.finish_reason}, {num_tokens} tokens")
        if endings:
            self._loop.call_later(KEEP_ENDED_S * 1.01, self._forget_ended)

    def _send(self, outgoing: dict[int, list[TokenDelta]]) -> None:
        for channel, deltas in outgoing.items():
            self._post(self._channels[channel], Tokens(deltas=tuple(deltas)))

    def _post(self, channel: Channel, message: Message) -> None:
        try:
            channel.post(message)
        except ChannelClosedError as error:
            # channel_closed follows and orphans what this channel held.
            logger.debug("a message could not be posted: %s", error)
        except ProtocolError as error:
            # It is too large: only its own request suffers, by a gap that the ingress sees.
            logger.error("a message could not be posted: %s", error)
