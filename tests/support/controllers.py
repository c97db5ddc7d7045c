"""A controller of a few lines that speaks the real protocol: for tests of worker and ingress without Ray."""

from pdserve.cluster.base.messages import (
    Message,
    MetricsAnswer,
    MetricsQuery,
    MetricsText,
    Register,
    Registered,
    Report,
    RouteAnswer,
    RouteQuery,
    Subscribe,
    View,
)
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.wire import Channel, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, WorkerInfo, WorkerLoad, WorkerState, WorkerView


class StubController:
    """Knows the workers that registered and routes to all of them."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._server = ChannelServer(settings, self)
        self._ingresses: list[Channel] = []
        self.workers: dict[Channel, WorkerInfo] = {}
        self.loads: list[WorkerLoad] = []
        self.failures: list[str] = []
        self.endpoint: Endpoint | None = None
        self.answers_routes = True

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
        """Send everyone the present view."""
        for channel in self._ingresses:
            if channel.is_open:
                channel.post(self._view())

    def _view(self) -> View:
        workers = tuple(
            WorkerView(info=info, state=WorkerState.READY, load=WorkerLoad()) for info in self.workers.values()
        )
        return View(sequence_no=1, workers=workers)

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        self.workers.pop(channel, None)
        if channel in self._ingresses:
            self._ingresses.remove(channel)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Register(info=info):
                self.workers[channel] = info
                channel.post(Registered(worker_id=info.worker_id))
                self.publish()
            case Subscribe():
                self._ingresses.append(channel)
                channel.post(self._view())
            case Report(load=load):
                self.loads.append(load)
            case RouteQuery(query_id=query_id) if self.answers_routes:
                worker_ids = tuple(info.worker_id for info in self.workers.values())
                channel.post(RouteAnswer(query_id=query_id, route=Route(worker_ids=worker_ids, reason="all")))
            case MetricsQuery(query_id=query_id):
                text = MetricsText(query_id=query_id, process="stub", text="")
                channel.post(MetricsAnswer(query_id=query_id, texts=(text,)))
            case _:
                self.failures.append(repr(message))
