"""The ingress's end of its channel to the controller: views, routes, merged metrics.

If the controller is away or slow, routes come from the last view, so requests go on.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from pdserve.cluster.base.errors import ChannelClosedError, NoWorkerError
from pdserve.cluster.base.ids import IngressId, WorkerId
from pdserve.cluster.base.messages import (
    ExplainQuery,
    Explanation,
    Message,
    MetricsAnswer,
    MetricsQuery,
    MetricsRequest,
    MetricsText,
    RouteAnswer,
    RouteQuery,
    Subscribe,
    Trace,
    TraceRequest,
    View,
)
from pdserve.cluster.base.prefix_hash import unit_chain
from pdserve.cluster.base.request import Request
from pdserve.cluster.base.route import Placeable, PrefixChain, Route
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, WorkerView
from pdserve.router.fallback import choose_from_view

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 2.0
QUICK_TOKENS = 4096
"""As many are named within a millisecond; more, off the loop."""


class ControllerClient:
    """Asks the controller; keeps its last view."""

    def __init__(
        self,
        ingress_id: IngressId,
        settings: ChannelSettings,
        resolve: Callable[[], Awaitable[Endpoint]],
        *,
        route_timeout_s: float,
        on_view: Callable[[tuple[WorkerView, ...]], None],
        metrics_text: Callable[[], str],
        traces: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._ingress_id = ingress_id
        self._route_timeout_s = route_timeout_s
        self._on_view = on_view
        self._metrics_text = metrics_text
        self._traces = traces
        self._client = ChannelClient(settings, self, resolve, name="controller")
        self._channel: Channel | None = None
        self._view: tuple[WorkerView, ...] = ()
        self._random = random.Random()
        self._num_queries = 0
        self._routes: dict[int, asyncio.Future[Route]] = {}
        self._metrics: dict[int, asyncio.Future[tuple[MetricsText, ...]]] = {}
        self._explanations: dict[int, asyncio.Future[Explanation]] = {}

    def start(self) -> None:
        """Connect in the background."""
        self._client.start()

    async def stop(self) -> None:
        """Disconnect."""
        await self._client.stop()

    @property
    def view(self) -> tuple[WorkerView, ...]:
        """The last view; empty before the first."""
        return self._view

    @property
    def is_connected(self) -> bool:
        """True while the channel to the controller is open."""
        return self._channel is not None

    async def route(self, request: Request, excluded: tuple[WorkerId, ...]) -> Route:
        """Return where to send a request; never raises for want of a controller."""
        number = self._next_query()
        answer: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._routes[number] = answer
        query = RouteQuery(query_id=number, request=await self._describe(request, excluded))
        try:
            self._post(query)
            route = await asyncio.wait_for(answer, self._route_timeout_s)
        except (ChannelClosedError, TimeoutError):
            route = Route(worker_ids=(), reason="the controller does not answer")
        finally:
            del self._routes[number]
        # Also a controller that has just restarted knows less than our last view.
        if route.worker_ids or route.refusal is not None:
            return route
        return choose_from_view(self._view, excluded, self._random)

    async def _describe(self, request: Request, excluded: tuple[WorkerId, ...]) -> Placeable:
        token_ids = (*request.prompt_token_ids, *request.resume_token_ids)
        identities = dict.fromkeys(worker.info.prefix_identity for worker in self._view)

        def make_chains() -> tuple[PrefixChain, ...]:
            return tuple(
                PrefixChain(identity=identity, names=unit_chain(identity, token_ids, salt=request.cache_salt))
                for identity in identities
            )

        is_long = len(token_ids) * len(identities) > QUICK_TOKENS
        return Placeable(
            request_id=request.request_id,
            attempt=request.attempt,
            num_tokens=len(token_ids),
            max_tokens=request.sampling.max_tokens - len(request.resume_token_ids),
            chains=await asyncio.to_thread(make_chains) if is_long else make_chains(),
            ttft_limit_s=request.ttft_limit_s,
            excluded=excluded,
        )

    async def explain(self, client_id: str) -> Explanation:
        """Return what the deployment knows of a client request. Raises NoWorkerError without a controller."""
        number = self._next_query()
        answer: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._explanations[number] = answer
        try:
            self._post(ExplainQuery(query_id=number, client_id=client_id))
            return await asyncio.wait_for(answer, METRICS_TIMEOUT_S)
        except (ChannelClosedError, TimeoutError) as error:
            raise NoWorkerError("the controller does not answer") from error
        finally:
            del self._explanations[number]

    async def metrics(self) -> tuple[MetricsText, ...]:
        """Return the metrics of every process; only our own if the controller is away."""
        number = self._next_query()
        answer: asyncio.Future[tuple[MetricsText, ...]] = asyncio.get_running_loop().create_future()
        self._metrics[number] = answer
        try:
            self._post(MetricsQuery(query_id=number))
            return await asyncio.wait_for(answer, METRICS_TIMEOUT_S)
        except (ChannelClosedError, TimeoutError):
            return (self._own_metrics(number),)
        finally:
            del self._metrics[number]

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
        channel.post(Subscribe(ingress_id=self._ingress_id))

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler: whoever waits for an answer takes the fallback now."""
        self._channel = None
        futures: list[asyncio.Future[Any]] = [
            *self._routes.values(),
            *self._metrics.values(),
            *self._explanations.values(),
        ]
        for future in futures:
            if not future.done():
                future.set_exception(ChannelClosedError(reason))

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case View(workers=workers):
                self._view = workers
                self._on_view(workers)
            case RouteAnswer(query_id=number, route=route):
                route_future = self._routes.get(number)
                if route_future is not None and not route_future.done():
                    route_future.set_result(route)
            case MetricsAnswer(query_id=number, texts=texts):
                metrics_future = self._metrics.get(number)
                if metrics_future is not None and not metrics_future.done():
                    metrics_future.set_result(texts)
            case Explanation(query_id=number):
                explained = self._explanations.get(number)
                if explained is not None and not explained.done():
                    explained.set_result(message)
            case MetricsRequest(query_id=number):
                channel.post(self._own_metrics(number))
            case TraceRequest(query_id=number, prefix=prefix):
                process = f"ingress:{self._ingress_id}"
                channel.post(Trace(query_id=number, process=process, timelines=self._traces(prefix)))
            case _:
                channel.close(f"unexpected {type(message).__name__} from the controller")

    def _own_metrics(self, query_id: int) -> MetricsText:
        return MetricsText(query_id=query_id, process=f"ingress:{self._ingress_id}", text=self._metrics_text())

    def _next_query(self) -> int:
        self._num_queries += 1
        return self._num_queries

    def _post(self, message: Message) -> None:
        if self._channel is None:
            raise ChannelClosedError("the controller is not connected")
        self._channel.post(message)
