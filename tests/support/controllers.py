"""A controller of a few lines that speaks the real protocol: for tests of worker and ingress without Ray."""

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import (
    CacheUpdate,
    Drain,
    ExplainQuery,
    Explanation,
    Message,
    MetricsAnswer,
    MetricsQuery,
    MetricsText,
    Peers,
    Register,
    Registered,
    Report,
    RouteAnswer,
    RouteQuery,
    SendSnapshot,
    Subscribe,
    View,
)
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.wire import Channel, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role, WorkerInfo, WorkerLoad, WorkerState, WorkerView
from pdserve.cluster.control.placement import Placement


class StubController:
    """Knows the workers that registered and routes to all of them."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._server = ChannelServer(settings, self)
        self._ingresses: list[Channel] = []
        self.workers: dict[Channel, WorkerInfo] = {}
        self.loads: list[WorkerLoad] = []
        self.cache_updates: list[CacheUpdate] = []
        self.failures: list[str] = []
        self.endpoint: Endpoint | None = None
        self.answers_routes = True
        self.placement: Placement | None = None
        """Chooses routes, instead of all workers in their order."""
        self.draining: set[WorkerId] = set()

    async def start(self) -> None:
        """Listen."""
        self.endpoint = await self._server.start("127.0.0.1")

    async def stop(self) -> None:
        """Stop listening and close every channel."""
        await self._server.stop()

    async def resolve(self) -> Endpoint:
        """What workers and ingresses are given to find it."""
        if self.endpoint is None:
            raise LookupError("no controller")
        return self.endpoint

    def publish(self) -> None:
        """Send everyone the present view, and decode workers their prefill workers."""
        self._announce()
        for channel in self._ingresses:
            if channel.is_open:
                channel.post(self._view())

    def _announce(self) -> None:
        prefills = tuple(info for info in self.workers.values() if info.role is Role.PREFILL)
        for channel, info in self.workers.items():
            if info.role is Role.DECODE and channel.is_open:
                channel.post(Peers(workers=prefills))

    def _view(self) -> View:
        workers = tuple(
            WorkerView(info=info, state=self._state_of(info), load=WorkerLoad()) for info in self.workers.values()
        )
        return View(sequence_no=1, workers=workers)

    def _route(self, query: RouteQuery) -> Route:
        """Everyone in order of registration; workers that were lost only at the end."""
        if self.placement is not None:
            return self.placement.choose(query.request)
        ready = [info for info in self.workers.values() if self._state_of(info) is WorkerState.READY]
        infos = sorted(ready, key=lambda info: info.worker_id in query.request.excluded)
        return Route(
            worker_ids=tuple(info.worker_id for info in infos if info.role.owns_requests),
            prefill_worker_ids=tuple(info.worker_id for info in infos if info.role is Role.PREFILL),
            reason="all",
        )

    def _placed(self, info: WorkerInfo, load: WorkerLoad) -> None:
        if self.placement is not None:
            self.placement.updated(WorkerView(info=info, state=self._state_of(info), load=load))

    def _state_of(self, info: WorkerInfo) -> WorkerState:
        return WorkerState.DRAINING if info.worker_id in self.draining else WorkerState.READY

    def drain(self, worker_id: WorkerId, *, tells_worker: bool = True) -> None:
        """Let a worker drain."""
        self.draining.add(worker_id)
        for channel, info in self.workers.items():
            if info.worker_id == worker_id and tells_worker:
                channel.post(Drain())
        self.publish()

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        if self.workers.pop(channel, None) is not None:
            self._announce()
        if channel in self._ingresses:
            self._ingresses.remove(channel)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Register(info=info, load=load):
                self.workers[channel] = info
                self._placed(info, load)
                channel.post(Registered(worker_id=info.worker_id))
                self.publish()
            case Subscribe():
                self._ingresses.append(channel)
                channel.post(self._view())
            case Report(load=load):
                self.loads.append(load)
                self._placed(self.workers[channel], load)
            case CacheUpdate():
                self.cache_updates.append(message)
                if self.placement is not None and not self.placement.cache_changed(message):
                    channel.post(SendSnapshot())
            case ExplainQuery(query_id=query_id, client_id=client_id):
                decisions = () if self.placement is None else self.placement.decisions(client_id)
                channel.post(Explanation(query_id=query_id, decisions=decisions, traces=()))
            case RouteQuery(query_id=query_id) if self.answers_routes:
                channel.post(RouteAnswer(query_id=query_id, route=self._route(message)))
            case MetricsQuery(query_id=query_id):
                text = MetricsText(query_id=query_id, process="stub", text="")
                channel.post(MetricsAnswer(query_id=query_id, texts=(text,)))
            case _:
                self.failures.append(repr(message))
