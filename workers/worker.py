"""The worker service: channels on one side, the engine thread on the other, all on one asyncio loop.

Ingresses connect to it; it connects to the controller. It knows nothing of Ray.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdserve.cluster.base.errors import ChannelClosedError, OverloadedError
from pdserve.cluster.base.messages import (
    Abort,
    Busy,
    Failed,
    Generate,
    Message,
    MetricsRequest,
    MetricsText,
    NotFound,
    Reclaim,
    Register,
    Registered,
    Report,
    Tokens,
)
from pdserve.cluster.base.metrics import WorkerMetrics
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, WorkerInfo, WorkerLoad
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine_thread import EngineThread, StepResult
from pdserve.workers.live_requests import LiveRequests

logger = logging.getLogger(__name__)

RECLAIM_S = 1.0
KEEP_ENDED_S = 6.0
"""Longer than a broken connection takes to be noticed by silence."""
REPORT_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the service needs to know besides its engine."""

    host: str
    channel: ChannelSettings


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
        self._counted = WorkerLoad()
        self._failure: str | None = None
        self._info: WorkerInfo | None = None
        self._thread = EngineThread(engine, self._publish, self._engine_failed)
        self._server = ChannelServer(settings.channel, self)
        self._controller = ControllerLink(self)
        self._controller_client = ChannelClient(
            settings.channel, self._controller, resolve_controller, name="controller"
        )

    async def start(self) -> WorkerInfo:
        """Start the engine thread, listen, and begin to register with the controller."""
        endpoint = await self._server.start(self._settings.host)
        self._info = self._describe(endpoint)
        self._thread.start()
        self._controller_client.start()
        self._controller.start_reporting()
        logger.info("worker_id=%s serves at %s:%d", self._info.worker_id, endpoint.host, endpoint.port)
        return self._info

    async def stop(self) -> None:
        """Close every channel and end the engine thread."""
        await self._controller.stop_reporting()
        await self._controller_client.stop()
        await self._server.stop()
        if not await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT_S):
            logger.error("the engine thread did not stop within %g s", STOP_TIMEOUT_S)

    @property
    def num_live(self) -> int:
        """Requests held now."""
        return len(self._live)

    def load(self) -> WorkerLoad:
        """Return the present load."""
        return self._thread.load()

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
        metrics.steps.inc(load.num_steps - before.num_steps)
        metrics.preemptions.inc(load.num_preemptions - before.num_preemptions)
        metrics.prefilled_tokens.inc(load.num_prefilled_tokens - before.num_prefilled_tokens)
        metrics.sampled_tokens.inc(load.num_generated_tokens - before.num_generated_tokens)
        self._counted = load
        return metrics.text()

    # Channels of ingresses.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channels[id(channel)] = channel

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler: its requests wait a moment to be reclaimed."""
        del self._channels[id(channel)]
        if self._live.channel_closed(id(channel), self._loop.time()):
            # A little later than the deadline, so that the comparison cannot miss it by rounding.
            self._loop.call_later(RECLAIM_S * 1.01, self._reap)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Generate(request=request):
                self._generate(channel, request)
            case Abort(request_id=request_id, attempt=attempt):
                if self._live.drop((request_id, attempt)):
                    self._metrics.ended.labels(FinishReason.ABORT.value).inc()
                    self._thread.abort(request_id, attempt)
            case Reclaim(request_id=request_id, attempt=attempt, next_index=next_index):
                missed = self._live.reclaim((request_id, attempt), id(channel), next_index)
                if missed is None:
                    self._post(channel, NotFound(request_id=request_id, attempt=attempt))
                else:
                    self._post(channel, Tokens(deltas=(missed,)))
            case _:
                channel.close(f"unexpected {type(message).__name__} from an ingress")

    def _generate(self, channel: Channel, request: Request) -> None:
        if self._failure is not None:
            self._busy(channel, request, f"the engine failed: {self._failure}", is_overloaded=False)
        elif self._live.add(request, id(channel)):
            self._thread.submit(request)
        else:
            self._busy(channel, request, "this attempt is already here", is_overloaded=False)

    def _busy(self, channel: Channel, request: Request, reason: str, *, is_overloaded: bool) -> None:
        message = Busy(
            request_id=request.request_id, attempt=request.attempt, reason=reason, is_overloaded=is_overloaded
        )
        self._post(channel, message)

    def _reap(self) -> None:
        for request_id, attempt in self._live.reap(self._loop.time()):
            logger.info("request_id=%s nobody reclaimed it: aborted", request_id)
            self._metrics.ended.labels(FinishReason.ABORT.value).inc()
            self._thread.abort(request_id, attempt)

    # From the engine thread.

    def _publish(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._deliver, result)

    def _engine_failed(self, cause: str) -> None:
        self._loop.call_soon_threadsafe(self._fail, cause)

    def _deliver(self, result: StepResult) -> None:
        for request, error in result.refusals:
            self._refuse(request, error)
        if result.step_s is not None:
            self._metrics.step_time.observe(result.step_s)
        for queue_s in result.queue_s:
            self._metrics.queue_time.observe(queue_s)
        if self._count_endings(result.deltas):
            self._loop.call_later(KEEP_ENDED_S * 1.01, self._forget_ended)
        self._send(self._live.deliver(result.deltas, self._loop.time()))

    def _refuse(self, request: Request, error: Exception) -> None:
        key = (request.request_id, request.attempt)
        if isinstance(error, OverloadedError):
            channel = self._live.channel_of(key)
            self._live.drop(key)
            if channel is not None:
                self._busy(self._channels[channel], request, str(error), is_overloaded=True)
            return
        ending = TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            sample=0,
            index=len(request.resume_token_ids),
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=str(error),
        )
        self._count_endings([ending])
        self._send(self._live.deliver([ending], self._loop.time()))

    def _fail(self, cause: str) -> None:
        self._failure = cause
        self._send(self._live.fail_all(f"the engine failed: {cause}", self._loop.time()))
        self._controller.report_failure(cause)

    def _forget_ended(self) -> None:
        self._live.forget_ended(self._loop.time())

    def _count_endings(self, deltas: Sequence[TokenDelta]) -> int:
        endings = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
        for reason in endings:
            self._metrics.ended.labels(reason.value).inc()
        return len(endings)

    def _send(self, outgoing: dict[int, list[TokenDelta]]) -> None:
        for channel, deltas in outgoing.items():
            self._post(self._channels[channel], Tokens(deltas=tuple(deltas)))

    def _post(self, channel: Channel, message: Message) -> None:
        try:
            channel.post(message)
        except ChannelClosedError as error:
            # channel_closed follows and orphans what this channel held.
            logger.debug("a message could not be posted: %s", error)


class ControllerLink:
    """The worker's end of its channel to the controller: registers, reports, answers for metrics."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
        info, load, failure = self._worker.registration()
        channel.post(Register(info=info, load=load))
        if failure is not None:
            channel.post(Failed(worker_id=info.worker_id, cause=failure))

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Registered():
                logger.info("the controller took this worker in")
            case MetricsRequest(query_id=query_id):
                info, _, _ = self._worker.registration()
                channel.post(
                    MetricsText(query_id=query_id, process=f"worker:{info.worker_id}", text=self._worker.metrics_text())
                )
            case _:
                channel.close(f"unexpected {type(message).__name__} from the controller")

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        self._channel = None

    def report_failure(self, cause: str) -> None:
        """Tell the controller now; if it is away, registration tells it later."""
        info, _, _ = self._worker.registration()
        self._post(Failed(worker_id=info.worker_id, cause=cause))

    def start_reporting(self) -> None:
        """Begin to send load reports."""
        self._task = asyncio.create_task(self._report(), name="load reports")

    async def stop_reporting(self) -> None:
        """End the reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _report(self) -> None:
        while True:
            info, load, _ = self._worker.registration()
            self._post(Report(worker_id=info.worker_id, load=load))
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _post(self, message: Message) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            # The channel is about to be reported closed; registration tells everything again.
            logger.debug("a message to the controller could not be posted: %s", error)
