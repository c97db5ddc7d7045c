"""Workers in processes of their own, without Ray and HTTP: what micro-benchmarks of the hand-off run on.

The controller is the real placement behind a channel server; workers are the real service, each pinned to a core.
"""

import asyncio
import multiprocessing
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.ids import IngressId, WorkerId, draw_incarnation
from pdserve.cluster.base.messages import (
    CacheUpdate,
    Message,
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
    View,
)
from pdserve.cluster.base.timeline import Timelines
from pdserve.cluster.base.wire import Channel, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import (
    Endpoint,
    NumericsClass,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    WorkerView,
)
from pdserve.cluster.control.least_loaded import LeastLoaded
from pdserve.cluster.control.placement import Placement
from pdserve.router.dispatch import Dispatcher
from pdserve.router.replay import Replayer, ReplaySettings
from pdserve.workers.actors import SWITCH_INTERVAL_S
from pdserve.workers.engine.engine import Engine
from pdserve.workers.kv.copy import make_copier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.worker import Worker, WorkerSettings

READY_TIMEOUT_S = 120.0
HOST = "127.0.0.1"

EngineFactory = Callable[[], tuple[Engine, KVStore]]
"""Makes a worker's engine in its own process; must be picklable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker process."""

    role: Role
    make_engine: EngineFactory
    core: int


class LocalController:
    """Knows the workers and routes by the real placement."""

    def __init__(self, settings: ChannelSettings, placement: Placement) -> None:
        self._server = ChannelServer(settings, self)
        self._placement = placement
        self._workers: dict[Channel, WorkerInfo] = {}
        self._loads: dict[Channel, WorkerLoad] = {}
        self._ingresses: list[Channel] = []
        self._texts: asyncio.Queue[MetricsText] = asyncio.Queue()
        self.endpoint = Endpoint(host=HOST, port=0)

    async def start(self) -> None:
        """Listen."""
        self.endpoint = await self._server.start(HOST)

    async def stop(self) -> None:
        """Close every channel."""
        await self._server.stop()

    async def resolve(self) -> Endpoint:
        """Return where it listens."""
        return self.endpoint

    @property
    def num_workers(self) -> int:
        """Workers that have registered."""
        return len(self._workers)

    @property
    def num_links(self) -> int:
        """Links that are open."""
        return sum(link.state == "open" for load in self._loads.values() for link in load.links)

    async def metrics(self) -> list[str]:
        """Return every worker's metrics."""
        for channel in self._workers:
            channel.post(MetricsRequest(query_id=0))
        return [(await self._texts.get()).text for _ in self._workers]

    def _view(self) -> tuple[WorkerView, ...]:
        return tuple(
            WorkerView(info=info, state=WorkerState.READY, load=self._loads[channel])
            for channel, info in self._workers.items()
        )

    def _placed(self, channel: Channel) -> None:
        info, load = self._workers[channel], self._loads[channel]
        self._placement.updated(WorkerView(info=info, state=WorkerState.READY, load=load))

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        info = self._workers.pop(channel, None)
        if info is not None:
            self._placement.removed(info.worker_id)

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Register(info=info, load=load):
                self._workers[channel], self._loads[channel] = info, load
                self._placed(channel)
                channel.post(Registered(worker_id=info.worker_id))
                prefills = tuple(found for found in self._workers.values() if found.role is Role.PREFILL)
                for worker, found in self._workers.items():
                    if found.role is Role.DECODE:
                        worker.post(Peers(workers=prefills))
                self._publish()
            case Report(load=load):
                self._loads[channel] = load
                self._placed(channel)
            case Subscribe():
                self._ingresses.append(channel)
                self._publish()
            case CacheUpdate():
                if not self._placement.cache_changed(message):
                    channel.post(SendSnapshot())
            case RouteQuery(query_id=query_id, request=request):
                channel.post(RouteAnswer(query_id=query_id, route=self._placement.choose(request)))
            case MetricsText():
                self._texts.put_nowait(message)
            case _:
                channel.close("unexpected")

    def _publish(self) -> None:
        for channel in self._ingresses:
            channel.post(View(sequence_no=0, workers=self._view()))


async def _serve(
    plan: WorkerPlan, worker_id: WorkerId, controller: Endpoint, channel: ChannelSettings, transfer: TransferConfig
) -> None:
    engine, store = await asyncio.to_thread(plan.make_engine)
    copier = make_copier(store)
    copier.warm_up()

    def describe(endpoint: Endpoint) -> WorkerInfo:
        return WorkerInfo(
            worker_id=worker_id,
            incarnation=draw_incarnation(),
            role=plan.role,
            endpoint=endpoint,
            pid=os.getpid(),
            device="cpu",
            model_name="benchmark",
            model_digest=store.layout.model_digest,
            numerics_digest="",
            numerics_class=NumericsClass.BITWISE,
            numerics_note="",
            vocab_size=0,
            max_model_len=0,
            num_blocks=max(store.num_blocks),
            block_size=store.block_size,
            max_running=engine.scheduler.max_running,
            max_batch_tokens=engine.scheduler.max_batch_tokens,
            prefix_identity=engine.identity,
            kv_token_bytes=store.layout.num_layers * store.layout.token_bytes,
            memory_bytes=0,
        )

    async def resolve() -> Endpoint:
        return controller

    settings = WorkerSettings(
        host=HOST, channel=channel, transfer=transfer, copiers=(copier,), max_waiting=1024, clock=SystemClock()
    )
    worker = Worker(engine, settings, describe, resolve)
    await worker.start()
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None, "started by a benchmark"
    # However that ends, a signal included, this process ends with it.
    await asyncio.to_thread(benchmark.join)


def _run_worker(
    plan: WorkerPlan, worker_id: WorkerId, controller: Endpoint, channel: ChannelSettings, transfer: TransferConfig
) -> None:
    os.sched_setaffinity(0, {plan.core})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(_serve(plan, worker_id, controller, channel, transfer))


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """Workers that serve, and what an ingress runs on."""

    controller: LocalController
    replayer: Replayer


@asynccontextmanager
async def running_cluster(
    plans: list[WorkerPlan], transfer: TransferConfig, placement: Placement | None = None
) -> AsyncIterator[LocalCluster]:
    """Start a process for each plan, and stop them. Without a `placement` the least loaded workers are chosen."""
    channel = ChannelSettings(token=secrets.token_bytes(32))
    controller = LocalController(channel, LeastLoaded() if placement is None else placement)
    await controller.start()
    clock = SystemClock()
    timelines = Timelines(clock)
    dispatcher = Dispatcher(
        IngressId("benchmark"),
        channel,
        controller.resolve,
        route_timeout_s=5.0,
        token_timeout_s=600.0,
        metrics_text=lambda: "",
        traces=timelines.matching,
    )
    dispatcher.start()
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    try:
        for number, plan in enumerate(plans):
            worker_id = WorkerId(f"{plan.role}-{number}")
            arguments = (plan, worker_id, controller.endpoint, channel, transfer)
            processes.append(context.Process(target=_run_worker, args=arguments, daemon=True))
            processes[-1].start()
        prefills = sum(plan.role is Role.PREFILL for plan in plans)
        decodes = sum(plan.role is Role.DECODE for plan in plans)
        async with asyncio.timeout(READY_TIMEOUT_S):
            # Several processes come up; nothing signals that all of them have.
            while not (  # noqa: ASYNC110
                controller.num_workers == len(plans)
                and controller.num_links == prefills * decodes
                and dispatcher.has_worker
            ):
                await asyncio.sleep(0.05)
        settings = ReplaySettings(max_attempts=1, replay_timeout_s=0.0)
        yield LocalCluster(controller, Replayer(dispatcher, settings, timelines, clock, lambda: None))
    finally:
        await dispatcher.stop()
        await controller.stop()
        for process in processes:
            process.kill()
            process.join()
