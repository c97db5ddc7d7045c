"""Requests leave workers that drain: same texts, nothing twice, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cluster.base.errors import NoWorkerError
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.request import FinishReason, Request, forks_of
from pdserve.router.replay import Replayer
from pdserve.workers.worker import Worker
from support.controllers import StubController
from support.engines import make_engine, make_request, prompts_of
from support.pairs import assert_clean, has_link
from support.runners import make_paced_engine
from support.services import (
    MODEL,
    collect,
    eventually,
    generate,
    opened,
    running_controller,
    running_replayer,
    running_worker,
)

NUM_TOKENS = 60


class Moving:
    """Two decode workers, one prefill worker, and a client."""

    def __init__(self, controller: StubController, replayer: Replayer, workers: list[Worker]) -> None:
        self.controller = controller
        self.replayer = replayer
        self.workers = workers
        self.num_moves = 0
        replayer.on_move = self._count

    def _count(self) -> None:
        self.num_moves += 1

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.worker_id == name)


@asynccontextmanager
async def running(*names: str) -> AsyncIterator[Moving]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        controller = await enter(running_controller())
        replayer = await enter(running_replayer(controller))
        workers = [await enter(running_worker(controller, make_paced_engine(MODEL), name)) for name in names]
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        for worker in workers:
            if worker.worker_id.startswith("decode") and "prefill-0" in names:
                await eventually(lambda worker=worker: has_link(worker), "linked")
        yield Moving(controller, replayer, workers)
        await assert_clean(*workers)


def draw_requests() -> list[Request]:
    """Half of them draw; the prompts are of a few blocks."""
    lengths = (1, 16, 47, 90, 130, 33)
    return [
        make_request(f"r{n}", prompt, max_tokens=NUM_TOKENS, temperature=0.9 if n % 2 else 0.0, seed=n)
        for n, prompt in enumerate(prompts_of(lengths))
    ]


@pytest.mark.parametrize(
    "names", [("prefill-0", "decode-0", "decode-1"), ("mixed-0", "mixed-1"), ("mixed-0", "decode-1", "prefill-0")]
)
@pytest.mark.parametrize("at_s", [0.0, 0.15, 0.4])
async def test_a_drain_moves_what_runs_and_changes_no_text(names: tuple[str, ...], at_s: float) -> None:
    requests = draw_requests()
    expected = {request.request_id: MODEL.generate(request) for request in requests}
    async with running(*names) as moving:
        tasks = [asyncio.create_task(generate(moving.replayer, request)) for request in requests]
        await asyncio.sleep(at_s)
        owner = next(name for name in names if not name.startswith("prefill"))
        moving.controller.drain(WorkerId(owner))
        for request, (tokens, reason) in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert tokens == expected[request.request_id], request.request_id
            assert reason is FinishReason.LENGTH
        if at_s == 0.15:
            assert moving.num_moves >= len(requests) // 2
            assert moving.worker(owner).load().num_generated_tokens < len(requests) * NUM_TOKENS / 2
        assert moving.worker(owner).load().is_idle
        again = make_request("again", requests[0].prompt_token_ids, max_tokens=4)
        before = moving.worker(owner).load().num_generated_tokens
        assert (await generate(moving.replayer, again))[0] == MODEL.generate(again)
        assert moving.worker(owner).load().num_generated_tokens == before


async def test_each_sample_moves_by_itself() -> None:
    forked = make_request("f", prompts_of((70,))[0], max_tokens=NUM_TOKENS, temperature=0.8, seed=3, forks=2)
    async with running("prefill-0", "decode-0", "decode-1") as moving:
        async with opened(moving.replayer, forked) as runs:
            tasks = [asyncio.create_task(collect(one)) for one in runs.values()]
            await asyncio.sleep(0.1)
            moving.controller.drain(WorkerId("decode-0"))
            texts = [tokens for tokens, _ in await asyncio.gather(*tasks)]
        assert moving.num_moves == 3
    assert texts == [MODEL.generate(sample) for sample in (forked, *forks_of(forked))]


async def test_log_probabilities_go_on_with_the_same_bits(tiny_checkpoints: dict[str, Path]) -> None:
    request = make_request(
        "s", prompts_of((40,))[0], max_tokens=400, temperature=0.7, seed=5, num_logprobs=2, num_prompt_logprobs=0
    )

    async def scores(replayer: Replayer, name: str, and_then: Callable[[], None]) -> list[object]:
        found: list[object] = []
        async with replayer.open(replace(request, request_id=RequestId(name))) as run:
            async for delta in run:
                found += [*delta.prompt_logprobs, *delta.logprobs]
                if len(found) == 100:
                    and_then()
        return found

    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(running_controller())
        replayer = await stack.enter_async_context(running_replayer(controller))
        for name in ("mixed-0", "mixed-1"):
            assembled = make_engine(tiny_checkpoints["llama"])
            worker = running_worker(controller, assembled.engine, name, stores=[assembled.store])
            await stack.enter_async_context(worker)
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        expected = await scores(replayer, "first", lambda: None)
        moves: list[str] = []
        replayer.on_move = lambda: moves.append("moved")
        again = await scores(replayer, "second", lambda: controller.drain(WorkerId("mixed-0")))
    assert moves == ["moved"]
    assert again == expected
    assert len(expected) == 39 + 400


async def test_without_another_worker_a_drain_waits_and_new_requests_are_told() -> None:
    request = make_request("r", prompts_of((40,))[0], max_tokens=NUM_TOKENS)
    async with running("prefill-0", "decode-0") as moving:
        task = asyncio.create_task(generate(moving.replayer, request))
        await eventually(lambda: moving.worker("decode-0").load().num_running == 1, "it runs")
        moving.controller.drain(WorkerId("decode-0"))
        with pytest.raises(NoWorkerError):
            await generate(moving.replayer, make_request("late", [5, 6], max_tokens=2))
        assert (await task)[0] == MODEL.generate(request)
        assert moving.num_moves == 0


async def test_a_target_that_dies_in_the_warm_up_or_after_costs_nothing() -> None:
    request = make_request("r", prompts_of((60,))[0], max_tokens=150)
    for pause_s in (0.02, 0.06, 0.15, 0.4):
        async with AsyncExitStack() as stack:
            moving = await stack.enter_async_context(running("prefill-0", "decode-0"))
            second = running_worker(moving.controller, make_paced_engine(MODEL), "decode-1")
            worker = await second.__aenter__()
            await eventually(lambda worker=worker: has_link(worker), "linked")
            task = asyncio.create_task(generate(moving.replayer, request))
            await eventually(lambda moving=moving: moving.worker("decode-0").load().num_running == 1, "it runs")
            moving.controller.drain(WorkerId("decode-0"), tells_worker=False)
            await asyncio.sleep(pause_s)
            await second.__aexit__(None, None, None)
            moving.controller.draining.clear()
            moving.controller.publish()
            tokens, reason = await task
            assert tokens == MODEL.generate(request), pause_s
            assert reason is FinishReason.LENGTH


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing() -> None:
    async with running("prefill-0", "decode-0", "decode-1") as moving:
        for number, pause_s in enumerate((0.0, 0.01, 0.03, 0.06, 0.1)):
            moving.controller.draining.clear()
            moving.controller.publish()
            request = make_request(f"r{number}", prompts_of((80,), seed=number)[0], max_tokens=200)
            task = asyncio.create_task(generate(moving.replayer, request))
            await eventually(lambda: any(worker.load().num_running for worker in moving.workers[1:]), "it runs")
            busy = next(worker.worker_id for worker in moving.workers[1:] if worker.load().num_running)
            moving.controller.drain(busy, tells_worker=False)
            await asyncio.sleep(pause_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await assert_clean(*moving.workers)
