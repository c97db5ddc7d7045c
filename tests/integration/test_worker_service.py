"""A worker over real channels: tokens, aborts, reclaims, BUSY, engine failure."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.cluster.base.errors import NoWorkerError, OverloadedError, WorkerLostError
from pdserve.cluster.base.request import FinishReason
from pdserve.router.replay import Replayer
from pdserve.workers.worker import Worker
from support.controllers import StubController
from support.engines import make_digest_engine, make_request, prompts_of
from support.runners import GatedRunner, make_paced_engine
from support.services import MODEL, eventually, generate, running_controller, running_replayer, running_worker


@pytest.fixture
async def controller() -> AsyncIterator[StubController]:
    async with running_controller() as running:
        yield running


@pytest.fixture
async def replayer(controller: StubController) -> AsyncIterator[Replayer]:
    async with running_replayer(controller, max_attempts=1) as running:
        yield running


def assert_clean(worker: Worker) -> None:
    load = worker.load()
    assert worker.num_live == 0
    assert (load.num_running, load.num_waiting, load.num_queued_prompt_tokens) == (0, 0, 0)
    assert load.num_free_blocks == load.num_blocks


async def test_many_streams_give_their_own_texts(controller: StubController, replayer: Replayer) -> None:
    requests = [
        make_request(str(n), prompt, max_tokens=20, temperature=n % 2, seed=n)
        for n, prompt in enumerate(prompts_of(range(3, 35)))
    ]
    async with running_worker(controller) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        results = await asyncio.gather(*(generate(replayer, request) for request in requests))
        for request, (tokens, reason) in zip(requests, results, strict=True):
            assert tokens == MODEL.generate(request)
            assert reason is FinishReason.LENGTH
        await eventually(lambda: worker.load().num_running == 0, "idle")
        assert_clean(worker)


async def test_leaving_a_stream_aborts_it_in_the_engine(controller: StubController, replayer: Replayer) -> None:
    async with running_worker(controller) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        async with replayer.open(make_request("gone", [10, 11], max_tokens=900)) as stream:
            async for _ in stream:
                break
        await eventually(lambda: worker.load().num_running == 0, "aborted")
        assert_clean(worker)
        assert 'ended_total{reason="abort"} 1.0' in worker.metrics_text()


async def test_aborts_while_waiting_leave_nothing(controller: StubController, replayer: Replayer) -> None:
    # known_faults B044
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL, max_running=1)
    engine.runner = runner
    async with running_worker(controller, engine) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        runner.gate.clear()
        tasks = [
            asyncio.create_task(generate(replayer, make_request(str(n), [10 + n], max_tokens=4))) for n in range(20)
        ]
        await eventually(lambda: worker.num_live == 20, "all are here")
        for task in tasks[:15]:
            task.cancel()
        await asyncio.gather(*tasks[:15], return_exceptions=True)
        runner.gate.set()
        for n, (tokens, _) in enumerate(await asyncio.gather(*tasks[15:]), start=15):
            assert tokens == MODEL.generate(make_request(str(n), [10 + n], max_tokens=4))
        await eventually(lambda: worker.load().num_running == 0 and worker.num_live == 0, "idle")
        assert_clean(worker)


async def test_a_full_queue_answers_busy_and_keeps_nothing(controller: StubController, replayer: Replayer) -> None:
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL, max_running=1, max_waiting=2)
    engine.runner = runner
    async with running_worker(controller, engine) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        runner.gate.clear()
        tasks = [asyncio.create_task(generate(replayer, make_request("0", [10], max_tokens=3)))]
        await eventually(lambda: worker.load().num_running == 1, "the first is in its step")
        tasks += [
            asyncio.create_task(generate(replayer, make_request(str(n), [10], max_tokens=3))) for n in range(1, 7)
        ]
        await eventually(lambda: worker.num_live == 7, "all are here")
        runner.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        expected = MODEL.generate(make_request("x", [10], max_tokens=3))
        assert [result for result in results if isinstance(result, tuple)] == [(expected, FinishReason.LENGTH)] * 3
        assert sum(isinstance(result, OverloadedError) for result in results) == 4
        await eventually(lambda: worker.num_live == 0, "idle")
        assert_clean(worker)


async def test_a_busy_worker_hands_the_request_to_the_next_of_the_route(
    controller: StubController, replayer: Replayer
) -> None:
    runner = GatedRunner(MODEL)
    runner.fails = True
    broken = make_digest_engine(MODEL)
    broken.runner = runner
    async with running_worker(controller, broken, "mixed-0"):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        with pytest.raises(WorkerLostError, match="exploded"):
            await generate(replayer, make_request("first", [10, 11], max_tokens=50))
        async with running_worker(controller, None, "mixed-1"):
            await eventually(lambda: len(replayer.dispatcher.controller.view) == 2, "both are known")
            await eventually(
                lambda: all(link.is_open for link in replayer.dispatcher._links.values()), "both are connected"
            )
            request = make_request("second", [10, 11], max_tokens=4)
            assert (await generate(replayer, request))[0] == MODEL.generate(request)


async def test_an_engine_exception_ends_requests_with_its_cause_and_marks_the_worker(
    controller: StubController, replayer: Replayer
) -> None:
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL)
    engine.runner = runner
    async with running_worker(controller, engine) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        runner.gate.clear()
        requests = [make_request(f"r{n}", [10, 11], max_tokens=50) for n in range(5)]
        tasks = [asyncio.create_task(generate(replayer, request)) for request in requests]
        await eventually(lambda: worker.num_live == 5, "all are here")
        runner.fails = True
        runner.gate.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["the engine failed: RuntimeError: the model exploded"] * 5
        assert all(isinstance(error, WorkerLostError) for error in errors)
        await eventually(lambda: any("the model exploded" in text for text in controller.failures), "reported")
        with pytest.raises(NoWorkerError, match="the model exploded"):
            await generate(replayer, make_request("late", [10]))


async def test_a_broken_channel_is_reclaimed_without_a_missing_or_doubled_token(
    controller: StubController, replayer: Replayer
) -> None:
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL)
    engine.runner = runner
    request = make_request("r", [10, 11, 12], max_tokens=200)
    async with running_worker(controller, engine) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        async with replayer.open(request) as stream:
            tokens: list[int] = []
            async for delta in stream:
                tokens += delta.token_ids
                if len(tokens) in (3, 50, 120):
                    for channel in list(worker._channels.values()):
                        channel.close("test: the connection breaks")
                    await asyncio.sleep(0.02)
            assert tokens == MODEL.generate(request)
        await eventually(lambda: worker.num_live == 0, "idle")


async def test_what_nobody_reclaims_is_aborted(controller: StubController) -> None:
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL)
    engine.runner = runner
    async with (
        running_replayer(controller, max_attempts=1, token_timeout_s=5.0) as lonely,
        running_worker(controller, engine) as worker,
    ):
        await eventually(lambda: lonely.dispatcher.has_worker, "connected")
        runner.gate.clear()
        task = asyncio.create_task(generate(lonely, make_request("r", [10], max_tokens=900)))
        await eventually(lambda: worker.num_live == 1, "here")
        # The ingress dies: its links vanish without an abort.
        for link in list(lonely.dispatcher._links.values()):
            await link._client.stop()
        runner.gate.set()
        await eventually(lambda: worker.num_live == 0, "reaped")
        await eventually(lambda: worker.load().num_running == 0, "aborted in the engine")
        assert_clean(worker)
        with pytest.raises(WorkerLostError):
            await task


async def test_a_worker_that_dies_ends_its_streams_with_an_error_that_says_so(
    controller: StubController, replayer: Replayer
) -> None:
    runner = GatedRunner(MODEL)
    engine = make_digest_engine(MODEL)
    engine.runner = runner
    async with running_worker(controller, engine) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        task = asyncio.create_task(generate(replayer, make_request("r", [10], max_tokens=1000)))
        await eventually(lambda: worker.load().num_generated_tokens > 3, "it streams")
        runner.gate.clear()
        await worker._server.stop()
        with pytest.raises(WorkerLostError, match="mixed-0 was lost"):
            await task
        runner.gate.set()
    with pytest.raises(NoWorkerError):
        await generate(replayer, make_request("next", [10]))


async def test_without_an_answer_of_the_controller_the_last_view_routes(
    controller: StubController, replayer: Replayer
) -> None:
    async with running_worker(controller):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        controller.answers_routes = False
        slow = make_request("slow", [10, 11], max_tokens=3)
        assert (await generate(replayer, slow))[0] == MODEL.generate(slow)
        await controller.stop()
        await eventually(lambda: not replayer.dispatcher.controller.is_connected, "the controller is gone")
        gone = make_request("gone", [10, 11], max_tokens=3)
        assert (await generate(replayer, gone))[0] == MODEL.generate(gone)


async def test_an_impossible_request_is_refused_with_an_error_not_a_hang(
    controller: StubController, replayer: Replayer
) -> None:
    async with running_worker(controller) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        async with replayer.open(make_request("huge", [10], max_tokens=10**6)) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[0].finish_reason is FinishReason.ERROR
        assert "this worker holds 1024" in (deltas[0].error or "")
        assert_clean(worker)


async def test_a_request_that_comes_while_the_channel_is_down_waits_for_it_a_moment(
    controller: StubController, replayer: Replayer
) -> None:
    async with running_worker(controller) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        for number in range(10):
            for channel in list(worker._channels.values()):
                channel.close("test: the connection breaks")
            request = make_request(str(number), [10, 11], max_tokens=5)
            assert (await generate(replayer, request))[0] == MODEL.generate(request)
        await eventually(lambda: worker.num_live == 0, "idle")


async def test_a_worker_that_stays_away_is_an_error_after_that_moment(
    controller: StubController, replayer: Replayer
) -> None:
    async with running_worker(controller) as worker:
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        await worker._server.stop()
        with pytest.raises(NoWorkerError, match=r"is not connected|lost its connection"):
            await generate(replayer, make_request("r", [10, 11], max_tokens=5))


async def test_a_worker_without_a_controller_and_requests_ends_itself() -> None:
    causes: list[str] = []
    async with running_controller() as controller:
        worker = running_worker(controller, make_paced_engine(MODEL), lease_s=0.4, end_process=causes.append)
        async with worker as served, running_replayer(controller, max_attempts=1) as replayer:
            await eventually(lambda: replayer.dispatcher.has_worker, "connected")
            await asyncio.sleep(0.8)
            assert causes == [], "a controller that says nothing is enough"
            request = make_request("r", [5, 6, 7], max_tokens=400)
            task = asyncio.create_task(generate(replayer, request))
            await eventually(lambda: served.load().num_running == 1, "it runs")
            await controller.stop()
            assert (await task)[0] == MODEL.generate(request), "a request keeps it alive"
            assert causes == []
            await eventually(lambda: bool(causes), "the lease is over")
            assert causes == ["no controller and no request for 0.4 s (workers.lease_s)"]
