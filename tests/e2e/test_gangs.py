"""Workers of several ranks as real Ray actors over Gloo: families, unequal ones, and failures of any rank."""

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from safetensors.torch import load_file, save_file

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.request import FinishReason, Request
from pdserve.cluster.base.worker_info import Role, WorkerDeath
from pdserve.cluster.control.launcher import GangShape, Launcher
from pdserve.deploy.locator import namespace_of
from support.clusters import (
    CHANNEL,
    READY_S,
    actors_of,
    is_complete,
    make_config,
    placement_groups,
    running_cluster,
    start_controller,
)
from support.engines import make_engine, make_request, prompts_of, run
from support.faulty_gang import Misdeed, Phase, trapped_creator
from support.gangs import running_gang
from support.oracle import assert_greedy, oracle
from support.services import generate

FOUND_S = {Misdeed.KILL: 1.0, Misdeed.RAISE: 1.0, Misdeed.HANG: 2.0, Misdeed.STOP: 2.0}
SLACK_S = 0.7
"""For a machine with fewer cores than processes, and for the polls of this test."""


def draw_requests() -> list[Request]:
    return [
        make_request(f"r{n}", prompt, max_tokens=24, temperature=0.9 if n % 2 else 0.0, seed=n)
        for n, prompt in enumerate(prompts_of((200, 1, 150, 64, 17)))
    ]


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_gangs_of_processes_have_the_texts_of_one_process(
    shared_checkpoints: Callable[[str], Path], family: str
) -> None:
    folder, requests = shared_checkpoints(family), draw_requests()
    with running_gang(folder, 2, max_batch_tokens=64) as gang:
        expected = run(gang.assembled.engine, requests)
    async with running_cluster(folder, "same", (2, 2)) as cluster:
        results = await asyncio.gather(*(generate(cluster.replayer, request) for request in requests))
        for request, (tokens, reason) in zip(requests, results, strict=True):
            assert reason is FinishReason.LENGTH
            assert tokens == expected[request.request_id]
        loads = {view.info.role.value: view.load for view in (await cluster.status()).workers}
        assert loads["decode"].num_prefilled_tokens == 0, "the KV came over the links"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        ((1, 2), TransportKind.TCP),
        ((2, 1), TransportKind.SHM),
        ((2, 1), TransportKind.NIXL),
        ((1, 2), TransportKind.TORCH_DIST),
    ],
)
async def test_gangs_of_unequal_size_hand_over(
    shared_checkpoints: Callable[[str], Path], ranks: tuple[int, int], transport: TransportKind
) -> None:
    folder = shared_checkpoints("llama")
    requests = [request for request in draw_requests() if request.sampling.temperature == 0.0]
    expected, model = run(make_engine(folder).engine, requests), oracle(folder)
    async with running_cluster(folder, "unequal", ranks, transports=(transport.value,)) as cluster:
        results = await asyncio.gather(*(generate(cluster.replayer, request) for request in requests))
        for request, (tokens, _) in zip(requests, results, strict=True):
            if tokens != expected[request.request_id]:
                assert_greedy(model, list(request.prompt_token_ids), tokens)
        views = (await cluster.status()).workers
        assert sum(view.load.num_prefilled_tokens for view in views if view.info.role.value == "decode") == 0
        links = [link for view in views for link in view.load.links]
        assert {(link.source_rank, link.sink_rank) for link in links} == {
            (source, sink) for source in range(ranks[0]) for sink in range(ranks[1])
        }
        assert {link.transport for link in links} == {transport.value}


SCENARIOS = {
    "a prefill worker": (
        (1, Phase.PREFILL, Misdeed.KILL),
        (0, Phase.PREFILL, Misdeed.RAISE),
        (1, Phase.PREFILL, Misdeed.RAISE),
        (1, Phase.PREFILL, Misdeed.HANG),
        (0, Phase.PREFILL, Misdeed.STOP),
        (0, Phase.GATHER, Misdeed.STOP),
        (1, Phase.GATHER, Misdeed.KILL),
    ),
    "a decode worker that takes KV in": (
        (1, Phase.SCATTER, Misdeed.KILL),
        (1, Phase.SCATTER, Misdeed.STOP),
        (0, Phase.SCATTER, Misdeed.KILL),
    ),
    "a decode worker": (
        (1, Phase.DECODE, Misdeed.RAISE),
        (0, Phase.DECODE, Misdeed.RAISE),
        (1, Phase.DECODE, Misdeed.HANG),
        (0, Phase.DECODE, Misdeed.HANG),
        (0, Phase.DECODE, Misdeed.STOP),
        (1, Phase.DECODE, Misdeed.KILL),
    ),
}


@pytest.mark.usefixtures("two_nodes")
async def test_a_gang_spans_nodes(shared_checkpoints: Callable[[str], Path]) -> None:
    folder, requests = shared_checkpoints("llama"), draw_requests()
    with running_gang(folder, 2, max_batch_tokens=64) as gang:
        expected = run(gang.assembled.engine, requests)
    async with running_cluster(folder, "spread", (2, 2), host="0.0.0.0", gang_strategy="STRICT_SPREAD") as cluster:
        groups = [group for group in placement_group_table().values() if group["name"].startswith("spread:")]
        nodes = [set(group["bundles_to_node_id"].values()) for group in groups]
        assert [len(each) for each in nodes] == [2, 2], "each gang has a rank on each node"
        endpoints = {view.info.endpoint.host for view in (await cluster.status()).workers}
        assert endpoints <= {"127.0.0.2", "127.0.0.3"}, "they listen where their nodes are reached"
        results = await asyncio.gather(*(generate(cluster.replayer, request) for request in requests))
        for request, (tokens, _) in zip(requests, results, strict=True):
            assert tokens == expected[request.request_id]


@pytest.mark.usefixtures("local_ray")
async def test_a_gang_that_lacks_ranks_is_replaced_by_the_next_controller(
    shared_checkpoints: Callable[[str], Path],
) -> None:
    # A controller that dies between the creation of two actors of a worker.
    folder, config = shared_checkpoints("llama"), make_config("halves", (2, 1), start_timeout_s=300)
    namespace = namespace_of(config.name)
    creator = trapped_creator(config=config, model_folder=str(folder), served_name="tiny", channel=CHANNEL)

    def create(worker_id: WorkerId, role: Role, rank: int, leader: str, options: dict[str, object]) -> object:
        if rank:
            raise InterruptedError("the controller dies")
        return creator(worker_id, role, rank, leader, options)

    shape = GangShape(num_ranks=2, resources={"CPU": 0.5}, strategy="PACK")
    launcher = Launcher(config.name, namespace, lambda role: shape, create)
    with pytest.raises(InterruptedError):
        await asyncio.to_thread(launcher.start, WorkerId("prefill-0"), Role.PREFILL)
    assert actors_of(config.name) == ["halves:worker:prefill-0"]
    controller = start_controller(config, folder)
    try:
        deadline = time.monotonic() + READY_S
        while not is_complete(status := await controller.status.remote()):
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.1)
    finally:
        await controller.stop_workers.remote()
        ray.kill(controller)
    assert not placement_groups(config.name)


@pytest.mark.usefixtures("local_ray")
async def test_what_no_start_can_help_on_another_rank_is_said_at_once(
    shared_checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    # Only the last rank reads the last expert.
    folder = shutil.copytree(shared_checkpoints("qwen3_moe"), tmp_path / "cut")
    weights = load_file(folder / "model.safetensors")
    last = max((name for name in weights if ".experts." in name), key=expert_of)
    save_file({name: tensor for name, tensor in weights.items() if name != last}, folder / "model.safetensors")
    controller = start_controller(make_config("cut", (2, 1)), folder)
    try:
        deadline = time.monotonic() + READY_S
        # The decode worker dies of the same, before or after it.
        while not (deaths := await deaths_of(controller, "prefill")):
            assert time.monotonic() < deadline, "never"
            await asyncio.sleep(0.1)
        first = deaths[0]
        assert first.is_permanent
        assert "rank 1: " in first.cause
        assert last in first.cause
    finally:
        await controller.stop_workers.remote()
        ray.kill(controller)


async def deaths_of(controller: Any, role: str) -> list[WorkerDeath]:
    deaths = (await controller.status.remote()).last_deaths
    return [death for death in deaths if death.worker_id.startswith(role)]


def expert_of(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


@pytest.mark.parametrize("whose", list(SCENARIOS))
@pytest.mark.usefixtures("local_ray")
async def test_whatever_happens_to_a_rank_ends_its_worker_soon_and_no_text(
    shared_checkpoints: Callable[[str], Path], tmp_path: Path, whose: str
) -> None:
    # known_faults B084, B086: each time the worker is replaced, and serves again.
    folder, request = shared_checkpoints("llama"), draw_requests()[0]
    drawn = make_request("drawn", request.prompt_token_ids, max_tokens=24, temperature=0.9, seed=3)
    with running_gang(folder, 2, max_batch_tokens=64) as gang:
        expected = run(gang.assembled.engine, [drawn])["drawn"]
    role, other = ("prefill", "decode") if "prefill" in whose else ("decode", "prefill")
    async with running_cluster(folder, "failures", (2, 2)) as cluster:
        for number, (rank, phase, misdeed) in enumerate(SCENARIOS[whose]):
            story = f"{misdeed} of rank {rank} of the {role} worker in {phase}"
            note = tmp_path / str(number)
            before = {view.info.role.value: view.info for view in (await cluster.status()).workers}
            victim = before[role].worker_id
            pids = [await cluster.actor(victim, one).pid.remote() for one in range(2)]
            await cluster.actor(victim, rank).set_trap.remote(phase, misdeed, str(note))
            again = replace(drawn, request_id=RequestId(f"n{number}"))
            task = asyncio.create_task(generate(cluster.replayer, again))
            await cluster.until(
                lambda status, victim=victim: any(death.worker_id == victim for death in status.last_deaths),
                f"{story}: the worker's death is seen",
            )
            found_s = time.monotonic() - float(note.read_text())
            death = next(death for death in (await cluster.status()).last_deaths if death.worker_id == victim)
            print(f"{story}: {found_s:.2f} s: {death.cause}")
            assert found_s < FOUND_S[misdeed] + SLACK_S, f"{story}: seen after {found_s:.1f} s: {death.cause}"
            tokens, reason = await task
            assert tokens == expected, f"{story}: another text"
            assert reason is FinishReason.LENGTH
            await cluster.until(is_complete, f"{story}: a new worker is linked")
            after = {view.info.role.value: view.info for view in (await cluster.status()).workers}
            assert after[other].incarnation == before[other].incarnation, f"{story}: the other worker was touched"
            assert not any(map(psutil.pid_exists, pids)), f"{story}: a process is left"
            workers = [info.worker_id for info in after.values()]
            assert actors_of("failures") == sorted(
                f"failures:worker:{worker}{mark}" for worker in workers for mark in ("", "~1")
            )
            assert sorted(placement_groups("failures")) == sorted(f"failures:worker:{worker}" for worker in workers)
