"""One attempt of a request in the ingress: routed, sent, streamed, ended exactly once.

`Dispatcher.place` finds a worker for an attempt and returns its `RequestStream`. A channel loss is not a worker's
death: the stream waits `RECLAIM_S` for the channel to come back and reclaims its tokens; after that, or when the
controller says that the worker is gone, it ends with WorkerLostError. Replays are in replay.py.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from pdserve.cluster.base.errors import (
    ChannelClosedError,
    NoWorkerError,
    OverloadedError,
    PdserveError,
    ProtocolError,
    TokenTimeoutError,
    WorkerLostError,
)
from pdserve.cluster.base.ids import AttemptKey, IngressId, WorkerId
from pdserve.cluster.base.messages import Abort, Busy, Generate, Message, NotFound, Reclaim, Tokens
from pdserve.cluster.base.request import Request, TokenDelta, forks_of
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role, WorkerInfo, WorkerState, WorkerView
from pdserve.router.controller_client import ControllerClient

logger = logging.getLogger(__name__)

RECLAIM_S = 1.0


class UnreachableError(NoWorkerError):
    """A routed worker cannot be asked for the moment, or has just stopped to take requests."""


class RequestStream:
    """The token deltas of one attempt; ends after the delta that carries a finish reason."""

    def __init__(self, request: Request, route: Route, timeout_s: float) -> None:
        self.request = request
        self.route = route
        self.next_index = len(request.resume_token_ids)
        self.has_ended = False
        self.is_over_at_worker = False
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[TokenDelta | PdserveError] = asyncio.Queue()
        self._first: TokenDelta | None = None

    @property
    def key(self) -> AttemptKey:
        """Request id and attempt."""
        return self.request.request_id, self.request.attempt

    def deliver(self, delta: TokenDelta) -> None:
        """Take a delta from the channel; tokens already known are cut off."""
        self.is_over_at_worker |= delta.finish_reason is not None
        if self.has_ended:
            return
        if delta.is_retryable:
            self.fail(WorkerLostError(delta.error or "the worker gave no cause"))
            return
        known = self.next_index - delta.index
        if known < 0:
            self.fail(ProtocolError(f"tokens {self.next_index} to {delta.index - 1} are missing"))
            return
        if known >= len(delta.token_ids) and delta.finish_reason is None and delta.token_ids:
            return
        self.next_index = max(self.next_index, delta.index + len(delta.token_ids))
        self.has_ended = delta.finish_reason is not None
        self._events.put_nowait(_cut(delta, known))

    def fail(self, error: PdserveError) -> None:
        """End the stream with an error; the first ending wins."""
        if not self.has_ended:
            self.has_ended = True
            self._events.put_nowait(error)

    async def wait_first(self) -> None:
        """Wait for the first event; raises if it is an error (BUSY, a lost worker)."""
        self._first = await self._next()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        delta = self._first if self._first is not None else await self._next()
        while True:
            yield delta
            if delta.finish_reason is not None:
                return
            delta = await self._next()

    async def _next(self) -> TokenDelta:
        try:
            event = await asyncio.wait_for(self._events.get(), self._timeout_s)
        except TimeoutError as error:
            raise TokenTimeoutError(f"no token within {self._timeout_s:g} s (ingress.token_timeout_s)") from error
        if isinstance(event, PdserveError):
            raise event
        return event


def _cut(delta: TokenDelta, known: int) -> TokenDelta:
    if known <= 0:
        return delta
    return replace(
        delta,
        index=delta.index + min(known, len(delta.token_ids)),
        token_ids=delta.token_ids[known:],
        logprobs=delta.logprobs[known:],
        prompt_logprobs=(),
    )


class WorkerLink:
    """The ingress's channel to one life of a worker, and the streams it carries."""

    def __init__(self, info: WorkerInfo, settings: ChannelSettings, on_open: Callable[[], None]) -> None:
        self.info = info
        self._on_open = on_open
        self._channel: Channel | None = None
        self._streams: dict[AttemptKey, RequestStream] = {}
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

        async def resolve() -> Endpoint:
            return info.endpoint

        self._client = ChannelClient(settings, self, resolve, name=info.worker_id)
        self._client.start()

    @property
    def is_open(self) -> bool:
        """True while requests can be sent."""
        return self._channel is not None

    @property
    def is_idle(self) -> bool:
        """True if nothing would be lost by closing."""
        return self._channel is None or not self._streams

    def send(self, stream: RequestStream, forks: Sequence[RequestStream], *, may_wait: bool) -> None:
        """Send the stream's request, which has these forks. Raises ChannelClosedError."""
        if self._channel is None:
            raise ChannelClosedError(f"{self.info.worker_id} is not connected")
        prefills = stream.route.prefill_worker_ids
        self._channel.post(Generate(request=stream.request, prefill_worker_ids=prefills, may_wait=may_wait))
        for sent in (stream, *forks):
            self._streams[sent.key] = sent

    def release(self, stream: RequestStream) -> None:
        """Forget a stream; if it has not ended, tell the worker to stop."""
        held = self._streams.pop(stream.key, None)
        if held is None or stream.is_over_at_worker or self._channel is None:
            return
        stream.has_ended = True
        request_id, attempt = stream.key
        try:
            self._channel.post(Abort(request_id=request_id, attempt=attempt))
        except ChannelClosedError as error:
            # The worker aborts by itself what nobody reclaims.
            logger.debug("request_id=%s abort not sent: %s", request_id, error)

    async def close(self, cause: str) -> None:
        """The worker is gone: fail every stream and disconnect."""
        self._fail_all(cause)
        await self._client.stop()

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler: after a reconnect, reclaim."""
        self._channel = channel
        self._on_open()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        for (request_id, attempt), stream in self._streams.items():
            channel.post(Reclaim(request_id=request_id, attempt=attempt, next_index=stream.next_index))

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler: give the channel a moment to come back."""
        self._channel = None
        self._deadline = self._loop.call_later(
            RECLAIM_S, self._fail_all, f"worker {self.info.worker_id} was lost: {reason}"
        )

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Tokens(deltas=deltas):
                for delta in deltas:
                    stream = self._streams.get((delta.request_id, delta.attempt))
                    if stream is not None:
                        stream.deliver(delta)
            case Busy(request_id=request_id, attempt=attempt, reason=reason, is_overloaded=is_overloaded):
                # One that serves nothing any more is soon out of the controller's routes: ask again.
                error = OverloadedError(reason) if is_overloaded else UnreachableError(reason)
                self._fail((request_id, attempt), error)
            case NotFound(request_id=request_id, attempt=attempt):
                self._fail((request_id, attempt), WorkerLostError("the worker no longer holds the request"))
            case _:
                channel.close(f"unexpected {type(message).__name__} from a worker")

    def _fail(self, key: AttemptKey, error: PdserveError) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            for request in (stream.request, *forks_of(stream.request)):
                failed = self._streams.get((request.request_id, request.attempt))
                if failed is not None:
                    failed.is_over_at_worker = True
                    failed.fail(error)

    def _fail_all(self, cause: str) -> None:
        for stream in self._streams.values():
            stream.fail(WorkerLostError(cause))


class PlacedStream:
    """An attempt that a worker has taken.

    Attributes:
        forks: the streams of its forks, until somebody takes them over.
    """

    def __init__(self, link: WorkerLink, stream: RequestStream, forks: "Sequence[PlacedStream]" = ()) -> None:
        self._link = link
        self.stream = stream
        self.forks = {fork.stream.request.request_id: fork for fork in forks}

    @property
    def worker_id(self) -> WorkerId:
        """Who has it."""
        return self._link.info.worker_id

    def release(self) -> None:
        """Forget the attempt and the forks it still has; abort what has not ended. May be repeated."""
        self._link.release(self.stream)
        for fork in self.forks.values():
            fork.release()
        self.forks.clear()


class Dispatcher:
    """Places attempts on workers."""

    def __init__(
        self,
        ingress_id: IngressId,
        settings: ChannelSettings,
        resolve_controller: Callable[[], Awaitable[Endpoint]],
        *,
        route_timeout_s: float,
        token_timeout_s: float,
        metrics_text: Callable[[], str],
        traces: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._settings = settings
        self._token_timeout_s = token_timeout_s
        self._changed = asyncio.Event()
        self._links: dict[tuple[WorkerId, str], WorkerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_view: Callable[[tuple[WorkerView, ...]], None] = lambda workers: None
        self.controller = ControllerClient(
            ingress_id,
            settings,
            resolve_controller,
            route_timeout_s=route_timeout_s,
            on_view=self._view_changed,
            metrics_text=metrics_text,
            traces=traces,
        )

    def start(self) -> None:
        """Connect to the controller; workers follow its view."""
        self.controller.start()

    async def stop(self) -> None:
        """Disconnect from everyone."""
        await self.controller.stop()
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close("the ingress stops")
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def has_worker(self) -> bool:
        """True if a ready worker that owns requests is connected."""
        ready = {worker.info.worker_id for worker in self.controller.view if worker.state is WorkerState.READY}
        return any(link.is_open and worker_id in ready for (worker_id, _), link in self._links.items())

    async def wait_change(self, timeout_s: float) -> None:
        """Wait for a new view or a channel that opens, or for the time."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            logger.debug("nothing has changed within %g s", timeout_s)

    async def place(
        self, request: Request, lost: tuple[WorkerId, ...] = (), preferred: WorkerId | None = None
    ) -> "PlacedStream":
        """Place one attempt and wait for its first event; workers in `lost` only if there is no other.

        A `preferred` worker is asked first, whatever the route.

        Raises NoWorkerError if nobody can take it, OverloadedError if all candidates are busy, WorkerLostError if the
        worker dies first. The caller releases what is returned.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECLAIM_S
        while True:
            try:
                return await self._place_now(request, lost, preferred)
            except UnreachableError:
                # A channel that broke may be back in a moment, as running streams hope too.
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise
                await self.wait_change(left_s)

    async def _place_now(
        self, request: Request, lost: tuple[WorkerId, ...], preferred: WorkerId | None
    ) -> "PlacedStream":
        """See `place`. Raises UnreachableError if a routed worker that might take it is not connected."""
        route = await self.controller.route(request, lost)
        if not route.worker_ids and lost and route.refusal is None:
            # Lost is not dead: it may be back by now.
            route = await self.controller.route(request, ())
        if route.refusal is not None:
            message = f"request {request.request_id}: {route.refusal.reason}"
            raise OverloadedError(message, retry_after_s=route.refusal.retry_after_s)
        if not route.worker_ids:
            raise NoWorkerError(route.reason)
        first = () if preferred is None or self._link(preferred) is None else (preferred,)
        links = [self._link(worker_id) for worker_id in dict.fromkeys((*first, *route.worker_ids))]
        # A decode worker without room is passed by; only if all are, the request waits at the best of them.
        refusals = await self._offer(request, route, links, may_wait=False)
        if isinstance(refusals, PlacedStream):
            return refusals
        if any(isinstance(error, OverloadedError) for error in refusals):
            patient = [link for link in links if link is not None and link.info.role is Role.DECODE]
            waited = await self._offer(request, route, patient, may_wait=True)
            if isinstance(waited, PlacedStream):
                return waited
            refusals = waited or refusals
        # Overloaded says most, unless somebody could not be asked.
        refusals.sort(key=lambda error: (isinstance(error, UnreachableError), isinstance(error, OverloadedError)))
        raise refusals[-1]

    async def _offer(
        self, request: Request, route: Route, links: Sequence[WorkerLink | None], *, may_wait: bool
    ) -> "PlacedStream | list[PdserveError]":
        """Offer the attempt to one worker after the other; return who took it, or why each did not.

        Raises WorkerLostError if a worker dies before it answers.
        """
        refusals: list[PdserveError] = []
        for link in links:
            if link is None or not link.is_open:
                refusals.append(UnreachableError("a routed worker is not connected"))
                continue
            forks = [
                PlacedStream(link, RequestStream(fork, route, self._token_timeout_s)) for fork in forks_of(request)
            ]
            placed = PlacedStream(link, RequestStream(request, route, self._token_timeout_s), forks)
            try:
                link.send(placed.stream, [fork.stream for fork in forks], may_wait=may_wait)
                await placed.stream.wait_first()
            except (OverloadedError, NoWorkerError) as error:
                refusals.append(error)
                placed.release()
            except ChannelClosedError as error:
                refusals.append(UnreachableError(str(error)))
                placed.release()
            except BaseException as error:
                placed.release()
                if isinstance(error, WorkerLostError):
                    error.worker_id = placed.worker_id
                raise
            else:
                logger.info("request_id=%s worker_id=%s %s", request.request_id, placed.worker_id, route.reason)
                return placed
        return refusals

    def _link(self, worker_id: WorkerId) -> WorkerLink | None:
        """Return the link to a worker, an open one if there is; None if this ingress does not know it yet."""
        found = [link for (name, _), link in self._links.items() if name == worker_id]
        return next((link for link in found if link.is_open), found[0] if found else None)

    def _view_changed(self, workers: tuple[WorkerView, ...]) -> None:
        self._changed.set()
        self.on_view(workers)
        owners = [worker.info for worker in workers if worker.info.role.owns_requests]
        present = {(info.worker_id, info.incarnation): info for info in owners}
        # A worker that left the view may still be finishing streams: its link ends with its channel or its last stream.
        for key in [key for key, link in self._links.items() if key not in present and link.is_idle]:
            link = self._links.pop(key)
            task = asyncio.create_task(link.close(f"worker {key[0]} was removed by the controller"))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key, info in present.items():
            if key not in self._links:
                self._links[key] = WorkerLink(info, self._settings, self._changed.set)
