"""The hand-off between real Ray actors, in processes of their own, over real transports, under trouble."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from pdserve.cluster.base.config import DeploymentConfig, TransferConfig, TransportKind
from pdserve.cluster.base.engine_config import EngineConfig, LinearKind
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.request import FinishReason, Request
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.plan import WorkerPlan
from support.controllers import StubController
from support.engines import make_engine, make_request, prompts_of, run
from support.faulty_actor import FaultyWorkerActor
from support.services import CHANNEL, eventually, generate, running_controller, running_replayer

NUM_REQUESTS = 1000
NUM_CLIENTS = 24


def draw_requests() -> list[Request]:
    rng = random.Random("actors")
    lengths = [rng.choice((1, 15, 16, 17, 33, rng.randint(1, 120))) for _ in range(NUM_REQUESTS)]
    return [
        make_request(
            str(number), prompt, max_tokens=rng.choice((1, 2, 4, 8)), temperature=float(number % 2), seed=number
        )
        for number, prompt in enumerate(prompts_of(lengths))
    ]


def reference(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    """Return the texts of one engine."""
    engine = make_engine(folder, linear=LinearKind.FP32).engine
    texts = {}
    for first in range(0, len(requests), 200):
        texts.update(run(engine, requests[first : first + 200], validate=False))
    return texts


@asynccontextmanager
async def running_actors(controller: StubController, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """Two prefill actors and one decode actor on a tiny model."""
    config = DeploymentConfig(
        engine=EngineConfig(linear=LinearKind.FP32, kv_memory_gib=0.02, max_running=32, num_threads=1),
        transfer=TransferConfig(transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10),
    )
    endpoint = controller.endpoint

    async def resolve() -> Any:
        return endpoint

    plans = [
        WorkerPlan(
            worker_id=WorkerId(name),
            role=role,
            config=config,
            model_folder=str(folder),
            served_name="tiny",
            channel=CHANNEL,
        )
        for name, role in (("prefill-0", Role.PREFILL), ("prefill-1", Role.PREFILL), ("decode-0", Role.DECODE))
    ]
    remote = ray.remote(num_cpus=1)(FaultyWorkerActor)
    actors = {plan.worker_id: remote.remote(plan, lambda: "127.0.0.1", resolve) for plan in plans}
    try:
        await asyncio.gather(*(actor.wait_started.remote() for actor in actors.values()))
        yield actors
    finally:
        for actor in actors.values():
            ray.kill(actor)


def has_links(controller: StubController, transports: set[str]) -> bool:
    """True if both links of the decode worker are open, over these transports, by its last report."""
    loads = [load for load in controller.loads[-6:] if len(load.links) == 2]
    return bool(loads) and all(link.state == "open" and link.transport in transports for link in loads[-1].links)


def counter(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


@pytest.mark.usefixtures("local_ray")
async def test_a_thousand_requests_with_a_transport_killed_half_way_damaged_chunks_and_leaving_clients(
    tiny_checkpoints: dict[str, Path],
) -> None:
    # known_faults B051, B059, B063; I12, I16
    requests = draw_requests()
    expected = reference(tiny_checkpoints["llama"], requests)
    rng = random.Random("clients")
    places = asyncio.Semaphore(NUM_CLIENTS)
    num_ended = 0
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_actors(controller, tiny_checkpoints["llama"]) as actors,
    ):
        decode = actors["decode-0"]
        sources = [actor for name, actor in actors.items() if name != "decode-0"]
        await eventually(lambda: has_links(controller, {"shm"}), "both links are open")
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")

        async def client(request: Request, patience_s: float | None) -> bool:
            nonlocal num_ended
            async with places:
                task = asyncio.create_task(generate(replayer, request))
                try:
                    tokens, reason = await asyncio.wait_for(task, patience_s)
                except TimeoutError:
                    return False
                finally:
                    num_ended += 1
                    if num_ended == NUM_REQUESTS // 2:
                        await asyncio.gather(*(source.kill_transport.remote("shm") for source in sources))
            assert tokens == expected[request.request_id], request.request_id
            assert reason is FinishReason.LENGTH
            return True

        finished = await asyncio.gather(
            *(client(request, rng.uniform(0.0, 0.1) if rng.random() < 0.15 else None) for request in requests)
        )
        assert NUM_REQUESTS * 0.8 < sum(finished) < NUM_REQUESTS
        texts = {}
        for name, actor in actors.items():
            for _ in range(100):
                is_clean, texts[name] = await actor.state.remote()
                if is_clean:
                    break
                await asyncio.sleep(0.05)
            assert is_clean, f"{name} leaks"
        assert counter(texts["decode-0"], "pdserve_kv_checksum_failures_total") > 10
        assert counter(texts["decode-0"], "pdserve_kv_failovers_total") > 0
        assert counter(texts["decode-0"], "pdserve_kv_transfers_received_total") > NUM_REQUESTS * 0.7
        await eventually(lambda: has_links(controller, {"tcp"}), "the other transport")
        probe = make_request("probe", [11] * 60, max_tokens=4)
        expected = reference(tiny_checkpoints["llama"], [probe])
        assert (await generate(replayer, probe))[0] == expected["probe"]
        assert (await decode.state.remote())[1]
