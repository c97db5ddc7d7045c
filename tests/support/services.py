"""A worker on the digest model and an ingress application, on real channels, in one event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from pdserve.cluster.base.config import IngressConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, WorkerInfo
from pdserve.router.ingress import IngressSettings, build_app
from pdserve.workers.engine.engine import Engine
from pdserve.workers.model.digest import DigestModel
from pdserve.workers.worker import Worker, WorkerSettings
from support.controllers import StubController
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
    controller: StubController, engine: Engine | None = None, name: str = "mixed-0"
) -> AsyncIterator[Worker]:
    """A worker that has registered."""

    def describe(endpoint: Endpoint) -> WorkerInfo:
        return make_info(WorkerId(name), endpoint=endpoint)

    worker = Worker(
        engine or make_digest_engine(MODEL),
        WorkerSettings(host="127.0.0.1", channel=CHANNEL),
        describe,
        controller.resolve,
    )
    await worker.start()
    await eventually(lambda: any(info.worker_id == name for info in controller.workers.values()), f"{name} registers")
    try:
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def running_ingress(
    controller: StubController, tokenizer_folder: Path, *, max_model_len: int = 1024, max_body_bytes: int = 1 << 20
) -> AsyncIterator[httpx.AsyncClient]:
    """An ingress application with a connected client; it is ready if a worker is."""
    settings = IngressSettings(
        config=IngressConfig(max_body_bytes=max_body_bytes, route_timeout_s=0.3, token_timeout_s=20.0),
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
