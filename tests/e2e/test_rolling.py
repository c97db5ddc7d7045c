"""Drain and rolling restart of real workers under load: no request fails, no text changes, nothing is left behind."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.request import FinishReason
from pdserve.cluster.base.worker_info import ClusterStatus
from support.clusters import Cluster, actors_of, placement_groups, serving
from support.deployments import Cli, Traces, assert_nothing_left
from support.engines import make_engine, make_request, prompts_of, run
from support.services import generate

NUM_CLIENTS = 6
REQUESTS = [
    make_request(str(number), prompt, max_tokens=600, temperature=0.8 if number % 2 else 0.0, seed=number)
    for number, prompt in enumerate(prompts_of((5, 60, 130, 17, 200, 250)))
]
STEP_S = 100.0


def make_config() -> DeploymentConfig:
    """One prefill and two decode workers, and room for one more."""
    return DeploymentConfig.model_validate(
        {
            "name": "rolling",
            "engine": {"linear": "fp32", "kv_memory_gib": 0.05, "num_threads": 1},
            "transfer": {"slot_bytes": 64 << 10},
            "workers": {"prefill": 1, "decode": 2, "num_cpus": 1.0},
        }
    )


def is_up(status: ClusterStatus) -> bool:
    states = [str(view.state) for view in status.workers]
    links = [link.state for view in status.workers for link in view.load.links]
    return states == ["ready"] * 3 and links == ["open"] * 2 and not status.starting


def workers_of(status: ClusterStatus) -> set[str]:
    return {str(view.info.worker_id) for view in status.workers}


class Load:
    """Clients that get one text after the other, with a pause, until they are stopped; every text is compared."""

    def __init__(self, cluster: Cluster, expected: dict[str, list[int]]) -> None:
        self._cluster = cluster
        self._expected = expected
        self._numbers = itertools.count()
        self._is_stopped = False
        self._clients = [asyncio.create_task(self._run(client)) for client in range(NUM_CLIENTS)]
        self.num_moves = 0
        cluster.replayer.on_move = self._count

    def _count(self) -> None:
        self.num_moves += 1

    async def _run(self, client: int) -> int:
        num_texts = 0
        while not self._is_stopped:
            original = REQUESTS[(client + num_texts) % len(REQUESTS)]
            sampling = original.sampling
            request = make_request(
                f"n{next(self._numbers)}",
                original.prompt_token_ids,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed,
            )
            tokens, reason = await generate(self._cluster.replayer, request)
            assert tokens == self._expected[original.request_id], request.request_id
            assert reason is FinishReason.LENGTH
            num_texts += 1
            await asyncio.sleep(0.3)
        return num_texts

    async def stop(self) -> int:
        """Return how many texts were right; raises what a client met."""
        self._is_stopped = True
        return sum(await asyncio.gather(*self._clients))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(300)
async def test_a_drain_and_a_rolling_restart_under_load_fail_nobody(
    shared_checkpoints: Callable[[str], Path],
) -> None:
    folder = shared_checkpoints("llama")
    expected = run(make_engine(folder).engine, REQUESTS, validate=False)
    async with serving(make_config(), folder, is_up) as cluster:
        load = Load(cluster, expected)
        await asyncio.sleep(1.0)
        first = workers_of(await cluster.status())
        assert first == {"prefill-0", "decode-0", "decode-1"}
        await cluster.controller.drain.remote(WorkerId("decode-0"))
        await cluster.until(lambda status: "decode-0" not in workers_of(status), "it stops", STEP_S)
        assert load.num_moves > 0
        await cluster.until(is_up, "it is replaced", STEP_S)
        second = workers_of(await cluster.status())
        assert second == {"prefill-0", "decode-1", "decode-2"}
        await cluster.controller.restart_rolling.remote()
        await cluster.until(lambda status: not status.rollout and is_up(status), "all are replaced", STEP_S)
        third = workers_of(await cluster.status())
        assert not third & second
        assert await load.stop() > 2 * NUM_CLIENTS
        assert (await cluster.status()).last_deaths == (), "nobody died"
        assert actors_of("rolling") == sorted(f"rolling:worker:{name}" for name in third)
        assert sorted(placement_groups("rolling")) == actors_of("rolling")


def test_the_commands(cli: Cli, shared_checkpoints: Callable[[str], Path]) -> None:
    before = Traces()
    settings = ("engine.kv_memory_gib=0.05", "workers.num_cpus=0.5", "ray.num_cpus=2", "engine.num_threads=1")
    model = shared_checkpoints("llama")
    up = cli.run(
        "up",
        *("--name", "roll", "--port", "0", "--detach", "--mixed", "2", "--model", str(model)),
        *(part for setting in settings for part in ("--set", setting)),
    )
    try:
        assert up.returncode == 0, up.stderr
        status = json.loads(cli.run("status", "--name", "roll", "--json").stdout)
        body = {"model": model.name, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        text = httpx.post(f"{status['url']}/v1/completions", json=body, timeout=30).json()["choices"]
        unknown = cli.run("drain", "mixed-99", "--name", "roll")
        assert (unknown.returncode, "mixed-99 is no worker that is ready" in unknown.stderr) == (2, True)
        plain = cli.run("restart", "--name", "roll")
        assert (plain.returncode, "--rolling" in plain.stderr) == (2, True)
        drained = cli.run("drain", "mixed-0", "--name", "roll")
        assert (drained.returncode, drained.stderr.split("\n")[-2]) == (0, "mixed-0 has stopped")
        rolled = cli.run("restart", "--rolling", "--name", "roll")
        assert (rolled.returncode, rolled.stderr.split("\n")[-2]) == (0, "every worker was replaced")
        after = json.loads(cli.run("status", "--name", "roll", "--json").stdout)
        names = {worker["info"]["worker_id"] for worker in after["workers"] if worker["state"] == "ready"}
        assert not names & {"mixed-0", "mixed-1"}
        assert len(names) == 2
        again = httpx.post(f"{status['url']}/v1/completions", json=body, timeout=30).json()["choices"]
        assert again == text
    finally:
        down = cli.run("down", "--name", "roll")
    assert down.returncode == 0, down.stderr
    assert_nothing_left(before)
