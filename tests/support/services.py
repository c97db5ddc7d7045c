"""A worker on the digest model and an ingress application, on real channels, in one event loop."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from pdserve.cluster.base.clock import Clock, SystemClock
from pdserve.cluster.base.config import AdmissionConfig, IngressConfig, TransferConfig
from pdserve.cluster.base.ids import IngressId, WorkerId, draw_incarnation
from pdserve.cluster.base.request import FinishReason, Request, forks_of
from pdserve.cluster.base.timeline import Timelines
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, WorkerInfo
from pdserve.router.dispatch import Dispatcher
from pdserve.router.ingress import IngressSettings, build_app
from pdserve.router.replay import Replayer, ReplaySettings, RequestRun
from pdserve.workers.engine.engine import Engine
from pdserve.workers.handoff.ranks import Gang
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.digest import DigestModel, DigestRunner
from pdserve.workers.worker import Worker, WorkerSettings
from support.controllers import StubController
from support.distant import DistantGang, FollowedRunner
from support.engines import make_digest_engine
from support.workers import make_info

CHANNEL = ChannelSettings(token=b"secret", heartbeat_s=0.1, silence_s=2.0, retry_min_s=0.01, retry_max_s=0.1)
MODEL = DigestModel(vocab_size=512)
DEADLINE_S = 10.0


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds; fails with `what` after DEADLINE_S."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 — conditions here are plain functions, nothing signals them
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


@asynccontextmanager
async def running_controller() -> AsyncIterator[StubController]:
    """A stub controller."""
    controller = StubController(CHANNEL)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


@asynccontextmanager
async def running_worker(
    controller: StubController,
    engine: Engine | None = None,
    name: str = "mixed-0",
    *,
    stores: Sequence[KVStore] = (),
    transfer: TransferConfig | None = None,
    make_copier: Callable[[KVStore], BlockCopier] = BlockCopier,
    reach: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
    clock: Clock | None = None,
    distance_s: float | None = None,
    gang: Gang | None = None,
    lease_s: float | None = None,
    end_process: Callable[[str], None] | None = None,
) -> AsyncIterator[Worker]:
    """A worker that has registered, in the role that its name says, on the digest model unless told.

    `reach` says where others are told to find it. With `distance_s`, ranks other than 0 are as if in other processes;
    otherwise `gang` are those whose stores are not given.
    """
    engine = engine or make_digest_engine(MODEL)
    if not stores:
        assert isinstance(engine.runner, DigestRunner), "a real model's store must be given"
        stores = engine.runner.stores
    incarnation = draw_incarnation()

    def describe(endpoint: Endpoint) -> WorkerInfo:
        info = make_info(WorkerId(name), endpoint=reach(endpoint), incarnation=incarnation)
        return replace(info, prefix_identity=engine.identity)

    copiers = tuple(map(make_copier, stores))
    for copier in copiers:
        copier.warm_up()
    transfer = transfer or TransferConfig(slot_bytes=64 << 10)
    clock = clock or SystemClock()
    distant = None
    if distance_s is not None and len(copiers) > 1:
        assert isinstance(engine.runner, DigestRunner), "a real model's ranks are elsewhere"
        gang = distant = DistantGang(copiers[1:], transfer, CHANNEL, clock, random.Random(name), distance_s)
        engine.runner = FollowedRunner(engine.runner, distant)
        copiers = copiers[:1]
    settings = WorkerSettings(
        host="127.0.0.1",
        channel=CHANNEL,
        transfer=transfer,
        copiers=copiers,
        max_waiting=256,
        clock=clock,
        gang=gang,
        lease_s=lease_s,
        end_process=end_process,
    )
    worker = Worker(engine, settings, describe, controller.resolve)
    await worker.start()
    await eventually(lambda: any(info.worker_id == name for info in controller.workers.values()), f"{name} registers")
    try:
        yield worker
    finally:
        await worker.stop()
        if distant is not None:
            await distant.stop()


@asynccontextmanager
async def running_replayer(
    controller: StubController,
    *,
    max_attempts: int = 3,
    replay_timeout_s: float = 10.0,
    token_timeout_s: float = 20.0,
    clock: Clock | None = None,
) -> AsyncIterator[Replayer]:
    """What an ingress runs its requests on, without HTTP."""
    clock = clock or SystemClock()
    timelines = Timelines(clock)
    dispatcher = Dispatcher(
        IngressId("test"),
        CHANNEL,
        controller.resolve,
        route_timeout_s=0.3,
        token_timeout_s=token_timeout_s,
        metrics_text=lambda: "",
        traces=timelines.matching,
    )
    dispatcher.start()
    settings = ReplaySettings(max_attempts=max_attempts, replay_timeout_s=replay_timeout_s)
    try:
        yield Replayer(dispatcher, settings, timelines, clock, lambda: None)
    finally:
        await dispatcher.stop()


async def collect(run: RequestRun) -> tuple[list[int], FinishReason | None]:
    """Return a request's tokens and its ending."""
    tokens: list[int] = []
    reason = None
    async for delta in run:
        tokens += delta.token_ids
        reason = delta.finish_reason
    return tokens, reason


async def generate(replayer: Replayer, request: Request) -> tuple[list[int], FinishReason | None]:
    """Run a request to its ending."""
    async with replayer.open(request) as run:
        return await collect(run)


@asynccontextmanager
async def opened(replayer: Replayer, request: Request) -> AsyncIterator[dict[str, RequestRun]]:
    """Open a request and take over its forks, as an answer does."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(replayer.open(request))
        runs = {str(request.request_id): first}
        for fork in forks_of(request):
            placed = first.take_fork(fork.request_id)
            runs[fork.request_id] = await stack.enter_async_context(replayer.open(fork, placed))
        yield runs


@asynccontextmanager
async def running_ingress(
    controller: StubController, tokenizer_folder: Path, *, max_model_len: int = 1024, max_body_bytes: int = 1 << 20
) -> AsyncIterator[httpx.AsyncClient]:
    """An ingress application with a connected client; it is ready if a worker is."""
    settings = IngressSettings(
        config=IngressConfig(
            max_body_bytes=max_body_bytes, route_timeout_s=0.3, token_timeout_s=20.0, replay_timeout_s=0.5
        ),
        admission=AdmissionConfig(classes={"interactive": 0.5}),
        channel=CHANNEL,
        served_name="tiny",
        model_folder=str(tokenizer_folder),
        vocab_size=512,
        max_model_len=max_model_len,
    )
    app = build_app(settings, controller.resolve)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", timeout=DEADLINE_S) as client:
            for _ in range(int(DEADLINE_S / 0.01)):
                if not controller.workers or (await client.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
            yield client
