"""A controller and its workers as real Ray actors, without HTTP: the test is the ingress."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import IngressId
from pdserve.cluster.base.timeline import Timelines
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import ClusterStatus
from pdserve.cluster.control.controller import Controller
from pdserve.deploy.locator import CONTROLLER_NAME, ControllerLocator, NodeHost, namespace_of
from pdserve.router.dispatch import Dispatcher
from pdserve.router.replay import Replayer, ReplaySettings
from support.faulty_gang import trapped_creator

CHANNEL = ChannelSettings(token=b"secret")
READY_S = 60.0


@dataclass
class Cluster:
    """A controller with its workers, and what an ingress runs on."""

    name: str
    controller: Any
    replayer: Replayer

    async def status(self) -> ClusterStatus:
        status: ClusterStatus = await self.controller.status.remote()
        return status

    async def until(self, condition: Callable[[ClusterStatus], bool], what: str, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(await self.status()):
            assert time.monotonic() < deadline, f"never: {what}: {await self.status()}"
            await asyncio.sleep(0.02)

    def actor(self, worker_id: str, rank: int) -> Any:
        mark = f"~{rank}" if rank else ""
        return ray.get_actor(f"{self.name}:worker:{worker_id}{mark}", namespace=namespace_of(self.name))


def is_complete(status: ClusterStatus) -> bool:
    """True if one worker of each role serves, and every stream has its link."""
    links = [link for view in status.workers for link in view.load.links]
    is_linked = bool(links) and all(link.state == "open" for link in links)
    return len(status.workers) == 2 and not status.starting and is_linked


def make_config(
    name: str,
    ranks: tuple[int, int],
    host: str = "127.0.0.1",
    transports: tuple[str, ...] = ("shm", "tcp"),
    **workers: object,
) -> DeploymentConfig:
    """A prefill and a decode worker with that many ranks each. No prompt is cached or LOCAL: all go the whole way."""
    return DeploymentConfig.model_validate(
        {
            "name": name,
            "engine": {
                "linear": "fp32",
                "kv_memory_gib": 0.02,
                "max_batch_tokens": 64,
                "num_threads": 1,
                "prefix_cache": False,
            },
            "placement": {"policy": "least_loaded"},
            "ingress": {"host": host},
            "transfer": {"slot_bytes": 64 << 10, "transports": transports},
            "workers": {
                "prefill": 1,
                "decode": 1,
                "restart_backoff_s": 0.1,
                "num_cpus": 0.5,
                "engine": {
                    "prefill": {"tensor_parallel": ranks[0]},
                    "decode": {"tensor_parallel": ranks[1]},
                },
                **workers,
            },
        }
    )


def start_controller(config: DeploymentConfig, folder: Path) -> Any:
    """Start a controller, which starts its workers."""
    namespace = namespace_of(config.name)
    creator = trapped_creator(config=config, model_folder=str(folder), served_name="tiny", channel=CHANNEL)
    controller = ray.remote(Controller).options(
        name=CONTROLLER_NAME, namespace=namespace, lifetime="detached", num_cpus=0
    )
    return controller.remote(config, namespace, NodeHost(config.ingress.host), CHANNEL, creator)


@asynccontextmanager
async def running_cluster(
    folder: Path,
    name: str,
    ranks: tuple[int, int],
    host: str = "127.0.0.1",
    transports: tuple[str, ...] = ("shm", "tcp"),
    **workers: object,
) -> AsyncIterator[Cluster]:
    """See make_config."""
    async with serving(make_config(name, ranks, host, transports, **workers), folder, is_complete) as cluster:
        yield cluster


@asynccontextmanager
async def serving(
    config: DeploymentConfig, folder: Path, is_up: Callable[[ClusterStatus], bool]
) -> AsyncIterator[Cluster]:
    """A deployment; begins when it `is_up`, and leaves nothing."""
    name, namespace = config.name, namespace_of(config.name)
    actor = start_controller(config, folder)
    clock = SystemClock()
    timelines = Timelines(clock)
    dispatcher = Dispatcher(
        IngressId("test"),
        CHANNEL,
        ControllerLocator(namespace),
        route_timeout_s=1.0,
        token_timeout_s=60.0,
        metrics_text=lambda: "",
        traces=timelines.matching,
    )
    dispatcher.start()
    settings = ReplaySettings(max_attempts=4, replay_timeout_s=60.0)
    cluster = Cluster(name, actor, Replayer(dispatcher, settings, timelines, clock, lambda: None))
    try:
        await cluster.until(is_up, "the workers are linked")
        yield cluster
    finally:
        await dispatcher.stop()
        await actor.stop_workers.remote()
        ray.kill(actor)
        assert not placement_groups(name), "a placement group is left"


def placement_groups(name: str) -> list[str]:
    groups = placement_group_table().values()
    return [group["name"] for group in groups if group["name"].startswith(f"{name}:") and group["state"] != "REMOVED"]


def actors_of(name: str) -> list[str]:
    everyone = ray.util.list_named_actors(all_namespaces=True)
    return sorted(entry["name"] for entry in everyone if entry["name"].startswith(f"{name}:"))
