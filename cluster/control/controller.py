"""The controller: a detached, named Ray actor that starts workers, knows them, and answers where requests go.

Its state is soft: after a restart it finds the worker actors by name, and everything else comes back as workers and
ingresses connect again. Nothing of a request's data passes through it. Shell around the pure tables Membership and
Placement.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import ray

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.errors import ChannelClosedError, ConfigError
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.logs import configure_logging
from pdserve.cluster.base.messages import (
    CacheUpdate,
    Drain,
    ExplainQuery,
    Explanation,
    Failed,
    Message,
    MetricsAnswer,
    MetricsQuery,
    MetricsRequest,
    MetricsText,
    Peers,
    Register,
    Registered,
    Report,
    RouteAnswer,
    RouteQuery,
    SendSnapshot,
    Subscribe,
    Trace,
    TraceRequest,
    View,
)
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.wire import Channel, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import ClusterStatus, Endpoint, Role, WorkerInfo, WorkerState, WorkerView
from pdserve.cluster.control.inquiries import Inquiries
from pdserve.cluster.control.launcher import Creator, GangShape, Launcher, cause_of
from pdserve.cluster.control.membership import Instruction, Membership, MembershipSettings, StartWorker, role_of
from pdserve.cluster.control.placement import make_placement
from pdserve.cluster.control.rollout import Rollout

logger = logging.getLogger(__name__)

TICK_S = 0.1
VIEW_INTERVAL_S = 0.5
METRICS_TIMEOUT_S = 1.0
LEAST_REPORT_S, REPORT_COST_S = 0.05, 0.001


class Controller:
    """The actor. `create_worker` is wired by the composition root."""

    def __init__(
        self,
        config: DeploymentConfig,
        namespace: str,
        own_host: Callable[[], str],
        channel: ChannelSettings,
        create_worker: Creator,
    ) -> None:
        """`own_host` returns where processes of this node listen."""
        configure_logging()
        self._config = config
        self._host = own_host()
        self._clock = SystemClock()
        self._membership = Membership(
            MembershipSettings(
                targets={role: config.workers.count(role) for role in Role},
                start_timeout_s=config.workers.start_timeout_s,
                backoff_s=config.workers.restart_backoff_s,
                stall_s=config.workers.stall_timeout_s,
                drain_timeout_s=config.workers.drain_timeout_s,
            ),
            self._clock,
        )
        self._rollout: Rollout | None = None
        self._placement = make_placement(config.placement)
        self._launcher = Launcher(config.name, namespace, self._shape_of, create_worker)
        self._server = ChannelServer(channel, self)
        self._workers: dict[Channel, tuple[WorkerId, Incarnation]] = {}
        self._ingresses: set[Channel] = set()
        self._announced: dict[Channel, tuple[WorkerInfo, ...]] = {}
        self._inquiries = Inquiries(self._post)
        self._view_no = 0
        self._is_stopping = False
        self._view_wanted = asyncio.Event()
        self._endpoint: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks("the controller")
        self._tasks.start(self._run())

    # Called through Ray: life cycle and status only.

    async def endpoint(self) -> Endpoint:
        """Return where the controller's channel server listens."""
        return await asyncio.shield(self._endpoint)

    async def status(self) -> ClusterStatus:
        """Return what the controller knows now."""
        await self.endpoint()
        return ClusterStatus(
            workers=tuple(sorted(self._membership.view(), key=lambda view: view.info.worker_id)),
            starting=tuple(self._membership.starting()),
            last_deaths=self._membership.last_deaths,
            controller_pid=os.getpid(),
            pauses=self._membership.pauses(),
            rollout="" if self._rollout is None else str(self._rollout),
        )

    async def drain(self, worker_id: WorkerId) -> None:
        """Let a worker move its requests, and stop it; another is started in its place. Raises ConfigError."""
        await self.endpoint()
        self._membership.drain(worker_id)
        self._drained(worker_id)

    async def restart_rolling(self) -> None:
        """Replace every worker that is ready, one at a time. Raises ConfigError if that is under way."""
        await self.endpoint()
        if self._rollout is not None:
            raise ConfigError(f"a rolling restart goes on already: {self._rollout}")
        ready = [view.info.worker_id for view in self._membership.view() if view.state is WorkerState.READY]
        self._rollout = Rollout(
            self._membership,
            ready,
            self._clock,
            surge_timeout_s=self._config.workers.surge_timeout_s,
            has_room=lambda role: self._launcher.has_room(self._shape_of(role)),
        )

    async def explain(self, client_id: str) -> Explanation:
        """Return why a client request went where it went, and the timelines that every process has of it."""
        await self.endpoint()
        answers = await self._inquiries.ask(
            self._processes, lambda number: TraceRequest(query_id=number, prefix=client_id), METRICS_TIMEOUT_S
        )
        traces = tuple(answer for answer in answers if isinstance(answer, Trace) and answer.timelines)
        return Explanation(query_id=0, decisions=self._placement.decisions(client_id), traces=traces)

    async def stop_workers(self) -> None:
        """Remove every worker and start no more: the deployment goes down."""
        self._is_stopping = True
        await asyncio.to_thread(self._launcher.remove_all)

    # The loop.

    async def _run(self) -> None:
        try:
            for worker_id in await asyncio.to_thread(self._launcher.running):
                self._membership.adopt(worker_id)
                self._watch(worker_id)
            self._endpoint.set_result(await self._server.start(self._host))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._publish_views(), name="views")
                group.create_task(self._tick(), name="membership")
        except Exception:
            logger.exception("the controller's loop failed")
            os._exit(1)  # Ray restarts the actor

    async def _tick(self) -> None:
        while not self._is_stopping:
            self._roll()
            for instruction in self._membership.tick():
                await self._execute(instruction)
            await asyncio.sleep(TICK_S)

    def _roll(self) -> None:
        """Go on with a rolling restart."""
        if self._rollout is None:
            return
        before = {view.info.worker_id for view in self._membership.view() if view.state is WorkerState.READY}
        self._rollout.tick()
        for worker_id in before:
            if not self._membership.is_ready(worker_id):
                self._drained(worker_id)
        if self._rollout.has_ended:
            logger.info("%s", self._rollout)
            self._rollout = None

    def _drained(self, worker_id: WorkerId) -> None:
        """A worker leaves: it, the placement and the ingresses learn it."""
        logger.info("worker_id=%s drains", worker_id)
        self._changed(worker_id)
        self._view_wanted.set()
        for channel, (name, _) in self._workers.items():
            if name == worker_id:
                self._post(channel, Drain())

    def _shape_of(self, role: Role) -> GangShape:
        engine, workers = self._config.engine_of(role), self._config.workers
        resources = {"CPU": workers.num_cpus}
        if engine.device != "cpu":
            resources["GPU"] = 1.0
        return GangShape(num_ranks=engine.tensor_parallel, resources=resources, strategy=workers.gang_strategy)

    def _watch(self, worker_id: WorkerId) -> None:
        self._tasks.start(self._watch_start(worker_id))
        for rank in range(1, self._shape_of(role_of(worker_id)).num_ranks):
            self._tasks.start(self._watch_rank(worker_id, rank))

    async def _watch_rank(self, worker_id: WorkerId, rank: int) -> None:
        """Bury a worker whose rank has ended, whatever its rank 0 does."""
        try:
            await self._launcher.wait_ended(worker_id, rank)
        except ray.exceptions.RayError as error:
            cause, is_permanent = cause_of(error, f"rank {rank}: its process died")
            instructions = self._membership.failed_to_start(worker_id, cause, is_permanent=is_permanent)
            for instruction in instructions or self._membership.failed(worker_id, cause):
                await self._execute(instruction)

    async def _watch_start(self, worker_id: WorkerId) -> None:
        """Bury a worker that cannot load, or dies while it does, with its cause; do not wait for the deadline."""
        try:
            await self._launcher.wait_started(worker_id)
        except ray.exceptions.RayError as error:
            cause, is_permanent = cause_of(error, str(error))
            for instruction in self._membership.failed_to_start(worker_id, cause, is_permanent=is_permanent):
                await self._execute(instruction)

    async def _execute(self, instruction: Instruction) -> None:
        self._view_wanted.set()
        try:
            if isinstance(instruction, StartWorker):
                await asyncio.to_thread(self._launcher.start, instruction.worker_id, instruction.role)
                self._watch(instruction.worker_id)
                return
            logger.info("worker_id=%s removed: %s", instruction.worker_id, instruction.cause)
            self._changed(instruction.worker_id)
            for channel, (worker_id, _) in list(self._workers.items()):
                if worker_id == instruction.worker_id:
                    channel.close("this worker was removed")
            await asyncio.to_thread(self._launcher.remove, instruction.worker_id)
        except (ray.exceptions.RayError, ValueError, OSError):
            # The membership keeps its deadline: a worker that was not created is replaced when its start times out.
            logger.exception("worker_id=%s the instruction failed", instruction.worker_id)

    async def _publish_views(self) -> None:
        while True:
            try:
                async with asyncio.timeout(VIEW_INTERVAL_S):
                    await self._view_wanted.wait()
            except TimeoutError:
                pass
            self._view_wanted.clear()
            if not self._membership.is_settled:
                # Ingresses know the workers better than a controller that has just restarted.
                continue
            self._view_no += 1
            workers = self._membership.view()
            view = View(sequence_no=self._view_no, workers=workers)
            for channel in tuple(self._ingresses):
                self._post(channel, view)
            self._announce_peers(workers)

    def _announce_peers(self, workers: tuple[WorkerView, ...]) -> None:
        """Tell the decode workers, when it has changed, which prefill workers to keep a link to.

        One whose channel to this process is lost for a moment keeps its links, also when this process has restarted:
        they are between the two.
        """
        if not self._membership.is_known(Role.PREFILL):
            return
        ready = tuple(view.info for view in workers if view.info.role is Role.PREFILL)
        for channel, (worker_id, _) in list(self._workers.items()):
            if role_of(worker_id) is Role.DECODE and self._announced.get(channel) != ready:
                self._announced[channel] = ready
                self._post(channel, Peers(workers=ready))

    # Channels.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler; the first message tells who it is."""

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        self._ingresses.discard(channel)
        self._announced.pop(channel, None)
        worker = self._workers.pop(channel, None)
        # A worker that is back over a new channel is not lost when its old one ends.
        if worker is not None and worker not in self._workers.values():
            logger.warning("worker_id=%s channel closed: %s", worker[0], reason)
            self._membership.lost(*worker)
            self._changed(worker[0])
            self._view_wanted.set()

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Register():
                self._register(channel, message)
            case Report(worker_id=worker_id, load=load):
                self._membership.reported(worker_id, load)
                self._changed(worker_id)
            case CacheUpdate():
                if not self._placement.cache_changed(message):
                    self._post(channel, SendSnapshot())
            case Failed(worker_id=worker_id, cause=cause):
                self._carry_out(self._membership.failed(worker_id, f"engine failed: {cause}"))
            case Subscribe(ingress_id=ingress_id):
                logger.info("ingress_id=%s subscribed", ingress_id)
                self._ingresses.add(channel)
                self._view_wanted.set()
            case RouteQuery():
                self._post(channel, RouteAnswer(query_id=message.query_id, route=self._route(message)))
            case MetricsQuery(query_id=query_id):
                self._tasks.start(self._scrape(channel, query_id))
            case ExplainQuery(query_id=query_id, client_id=client_id):
                self._tasks.start(self._answer_explanation(channel, query_id, client_id))
            case MetricsText() | Trace():
                self._inquiries.answered(message)
            case _:
                channel.close(f"unexpected {type(message).__name__}")

    def _route(self, query: RouteQuery) -> Route:
        if not self._membership.is_settled:
            return Route(worker_ids=(), reason="the controller has just started")
        return self._placement.choose(query.request)

    @property
    def _report_interval_s(self) -> float:
        """Of each worker: the controller takes a bounded number of reports a second in."""
        return max(LEAST_REPORT_S, len(self._workers) * REPORT_COST_S)

    def _changed(self, worker_id: WorkerId) -> None:
        """A worker is not what it was: the placement learns it."""
        view = self._membership.view_of(worker_id)
        if view is None:
            self._placement.removed(worker_id)
        else:
            self._placement.updated(view)

    async def _scrape(self, channel: Channel, query_id: int) -> None:
        answers = await self._inquiries.ask(
            self._processes, lambda number: MetricsRequest(query_id=number), METRICS_TIMEOUT_S
        )
        texts = tuple(answer for answer in answers if isinstance(answer, MetricsText))
        self._post(channel, MetricsAnswer(query_id=query_id, texts=texts))

    async def _answer_explanation(self, channel: Channel, query_id: int, client_id: str) -> None:
        self._post(channel, replace(await self.explain(client_id), query_id=query_id))

    @property
    def _processes(self) -> set[Channel]:
        return {*self._workers, *self._ingresses}

    def _register(self, channel: Channel, message: Register) -> None:
        info = message.info
        if not self._membership.registered(info, message.load):
            logger.warning("worker_id=%s is not of this deployment's present workers: removed", info.worker_id)
            channel.close("unknown worker")
            self._tasks.start(asyncio.to_thread(self._launcher.remove, info.worker_id))
            return
        logger.info("worker_id=%s is ready: %s", info.worker_id, info.numerics_class)
        self._workers[channel] = (info.worker_id, info.incarnation)
        self._changed(info.worker_id)
        self._post(channel, Registered(worker_id=info.worker_id, report_interval_s=self._report_interval_s))
        self._view_wanted.set()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._tasks.start(self._execute(instruction))

    def _post(self, channel: Channel, message: Message) -> None:
        try:
            channel.post(message)
        except ChannelClosedError as error:
            logger.debug("a message could not be posted: %s", error)
