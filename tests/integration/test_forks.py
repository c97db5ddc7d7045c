"""n > 1: samples that share a prompt, on one worker, over the hand-off, and through the ingress."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.errors import OverloadedError
from pdserve.cluster.base.request import FinishReason, Request, forks_of
from pdserve.router.replay import Replayer
from pdserve.workers.worker import Worker
from support.bits import plain_engine, recording_engine
from support.checkpoints import make_tokenizer
from support.engines import make_digest_engine, make_engine, make_request, prompts_of, run
from support.pairs import LAYER_BYTES, assert_clean, received_bytes, running_pair, transfer_config
from support.runners import GatedCopier
from support.services import (
    MODEL,
    collect,
    eventually,
    opened,
    running_controller,
    running_ingress,
    running_replayer,
    running_worker,
)

Results = dict[str, tuple[list[int], FinishReason | None]]


async def generate_all(replayer: Replayer, request: Request) -> Results:
    async with opened(replayer, request) as runs:
        found = await asyncio.gather(*(collect(item) for item in runs.values()))
        return dict(zip(runs, found, strict=True))


def expected_of(request: Request) -> dict[str, list[int]]:
    return {sample.request_id: MODEL.generate(sample) for sample in (request, *forks_of(request))}


def assert_texts(results: Results, request: Request) -> None:
    assert {name: tokens for name, (tokens, _) in results.items()} == expected_of(request)
    assert all(reason is FinishReason.LENGTH for _, reason in results.values())


@pytest.mark.parametrize("transport", list(TransportKind))
@pytest.mark.parametrize("length", [1, 16, 17, 32, 47, 100])
async def test_forks_cost_one_transfer_and_have_their_own_texts(transport: TransportKind, length: int) -> None:
    # I10
    request = make_request("r", prompts_of([length])[0], max_tokens=12, temperature=1.0, seed=5, forks=3)
    async with running_pair(transfer_config(transport)) as pair:
        results = await generate_all(pair.replayer, request)
        assert_texts(results, request)
        assert len({tuple(tokens) for tokens, _ in results.values()}) == 4
        assert received_bytes(pair.decode) == (length + min(length, 24)) * LAYER_BYTES
        assert pair.prefill.load().num_prefilled_tokens == length
        # Each fork computes the prompt's last token again, to draw from it.
        assert pair.decode.load().num_prefilled_tokens == 3
        await assert_clean(pair.prefill, pair.decode)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_forks_of_a_request_that_ends_with_its_first_token(max_tokens: int) -> None:
    request = make_request("r", prompts_of([40])[0], max_tokens=max_tokens, temperature=1.0, seed=5, forks=2)
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        assert_texts(await generate_all(pair.replayer, request), request)
        await assert_clean(pair.prefill, pair.decode)


async def test_forks_without_a_place_wait_and_are_right() -> None:
    # Two rows for four samples, and a pool that cannot hold them all.
    decode = make_digest_engine(MODEL, num_blocks=12, max_running=2)
    requests = [
        make_request(f"r{n}", prompts_of([60], seed=n)[0], max_tokens=30, temperature=1.0, seed=n, forks=3)
        for n in range(3)
    ]
    async with running_pair(transfer_config(TransportKind.SHM), decode=decode) as pair:
        for request, results in zip(
            requests, await asyncio.gather(*(generate_all(pair.replayer, item) for item in requests)), strict=True
        ):
            assert_texts(results, request)
        await assert_clean(pair.prefill, pair.decode)


async def test_clients_that_leave_at_any_time_leave_no_record() -> None:
    # known_faults B048
    rng = random.Random(7)
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:

        async def leave(number: int) -> None:
            request = make_request(
                f"r{number}", prompts_of([60], seed=number % 5)[0], max_tokens=30, temperature=1.0, seed=number, forks=3
            )
            task = asyncio.create_task(generate_all(pair.replayer, request))
            await asyncio.wait([task], timeout=rng.random() ** 2 * 0.3)
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert_texts(task.result(), request)

        for start in range(0, 200, 20):
            await asyncio.gather(*(leave(number) for number in range(start, start + 20)))
        await assert_clean(pair.prefill, pair.decode)
        assert not pair.decode._live._live.keys() - {
            key for key, live in pair.decode._live._live.items() if live.ending is not None
        }
        probe = make_request("probe", prompts_of([50])[0], max_tokens=8, temperature=1.0, seed=3, forks=2)
        assert_texts(await generate_all(pair.replayer, probe), probe)


async def test_samples_go_on_elsewhere_when_their_worker_dies() -> None:
    request = make_request("r", prompts_of([50])[0], max_tokens=150, temperature=1.0, seed=5, forks=2)
    async with running_pair(transfer_config(TransportKind.TCP)) as pair, opened(pair.replayer, request) as runs:
        tasks = [asyncio.create_task(collect(item)) for item in runs.values()]
        await asyncio.sleep(0.05)
        async with running_worker(pair.controller, name="mixed-1") as other:
            await eventually(lambda: len(pair.replayer.dispatcher._links) == 2, "the other worker is known")
            await pair.decode.stop()
            results = dict(zip(runs, await asyncio.gather(*tasks), strict=True))
            assert_texts(results, request)
            await assert_clean(other)


def test_forks_have_the_bits_of_requests_that_run_alone(tiny_checkpoints: dict[str, Path]) -> None:
    for family in ("qwen3", "gemma3"):
        assembled = make_engine(tiny_checkpoints[family])
        request = make_request("r", prompts_of([77])[0], max_tokens=20, temperature=0.9, seed=4, forks=3)
        samples = (request, *forks_of(request))
        alone = {}
        for sample in samples:
            plain = Request(
                request_id=sample.request_id,
                attempt=0,
                prompt_token_ids=sample.prompt_token_ids,
                sample=sample.sample,
                sampling=sample.sampling,
            )
            alone |= run(plain_engine(assembled), [plain])
        for limits in ({}, {"max_batch_tokens": 13}, {"num_blocks": 12}, {"max_running": 2}):
            engine, _, _ = recording_engine(assembled, **limits)
            assert run(engine, [request]) == alone
            assert engine.pool.is_all_free


@pytest.fixture
async def client(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Worker]]:
    make_tokenizer().save_pretrained(str(tmp_path))
    engine = plain_engine(make_engine(tiny_checkpoints["qwen2"]))
    async with (
        running_controller() as controller,
        running_worker(controller, engine, stores=(engine.runner.store,)) as worker,  # type: ignore[attr-defined]
        running_ingress(controller, tmp_path) as found,
    ):
        yield found, worker


async def test_choices_and_usage_of_n(client: tuple[httpx.AsyncClient, Worker]) -> None:
    # known_faults B012
    payload = {
        "model": "tiny",
        "prompt": [[40, 41, 42], [50] * 20],
        "max_tokens": 9,
        "ignore_eos": True,
        "seed": 3,
        "n": 3,
    }
    whole = (await client[0].post("/v1/completions", json=payload)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 23
    assert whole["usage"]["completion_tokens"] == 54
    assert len({choice["text"] for choice in whole["choices"]}) == 6
    answer = await client[0].post(
        "/v1/completions", json={**payload, "stream": True, "stream_options": {"include_usage": True}}
    )
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    texts, endings = [""] * 6, []
    for event in events[:-1]:
        assert event.get("usage") is None
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        endings += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert sorted(endings) == list(range(6))
    assert events[-1]["choices"] == []
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][key] == whole["usage"][key]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "n": 4, "seed": 1}
    choices = (await client[0].post("/v1/chat/completions", json=chat)).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 4
    await eventually(lambda: client[1].num_live == 0, "nothing is left")


async def test_a_first_sample_that_stops_at_once_leaves_the_others_running() -> None:
    # Its client's stop string matched the first token, before the KV was complete.
    request = make_request("r", prompts_of([60])[0], max_tokens=12, temperature=1.0, seed=5, forks=2)
    async with running_pair(transfer_config(TransportKind.SHM), make_copier=GatedCopier) as pair:
        copier = pair.decode._settings.copiers[0]
        assert isinstance(copier, GatedCopier)
        copier.gate.clear()
        task = asyncio.create_task(_stop_after_first_token(pair.replayer, request))
        await asyncio.sleep(0.2)
        copier.gate.set()
        results = await task
        expected = expected_of(request)
        assert {name: tokens for name, (tokens, _) in results.items()} == {
            name: expected[name] for name in request.forks
        }
        await assert_clean(pair.prefill, pair.decode)


async def _stop_after_first_token(replayer: Replayer, request: Request) -> Results:
    first = replayer.open(request)
    run = await first.__aenter__()
    forks = [(fork, run.take_fork(fork.request_id)) for fork in forks_of(request)]
    await first.__aexit__(None, None, None)  # the first token is here, and it is enough

    async def go_on(fork: Request, placed: Any) -> tuple[list[int], FinishReason | None]:
        async with replayer.open(fork, placed) as item:
            return await collect(item)

    found = await asyncio.gather(*(go_on(fork, placed) for fork, placed in forks))
    return dict(zip(request.forks, found, strict=True))


async def test_a_full_queue_keeps_no_record_of_forks() -> None:
    engine = make_digest_engine(MODEL, max_running=1, max_waiting=1)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, engine) as worker,
    ):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        long = [make_request(f"long {n}", [10] * 20, max_tokens=400) for n in range(2)]
        tasks = [asyncio.create_task(generate_all(replayer, item)) for item in long]
        await eventually(lambda: worker.num_live == 2, "both are there")
        refused = make_request("refused", [11] * 5, max_tokens=5, forks=7)
        with pytest.raises(OverloadedError):
            await generate_all(replayer, refused)
        assert worker.num_live == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: worker.num_live == 0, "nothing is left")
