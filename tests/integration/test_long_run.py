"""What shows only after many requests, or after a long silence: decay, stalls, leaks, links that died unnoticed."""

import asyncio
import random
import time
from pathlib import Path

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.request import FinishReason, Request
from pdserve.cluster.base.worker_info import Endpoint
from support.black_hole import running_black_hole
from support.checkpoints import make_tokenizer
from support.engines import make_digest_engine, make_request, prompts_of
from support.pairs import assert_clean, has_link, running_pair, transfer_config
from support.services import (
    MODEL,
    eventually,
    generate,
    running_controller,
    running_ingress,
    running_replayer,
    running_worker,
)


def make_mix(count: int) -> list[Request]:
    """Return requests of mixed lengths, half of them drawing; every fiftieth has the first one's prompt."""
    rng = random.Random(5)
    requests = []
    for number in range(count):
        is_first = number % 50 == 0
        length = 70 if is_first else rng.choice((1, 15, 16, 17, 40, 90, 150))
        requests.append(
            make_request(
                str(number),
                prompts_of([length], seed=0 if is_first else number)[0],
                max_tokens=rng.randint(1, 30),
                temperature=rng.choice((0.0, 0.9)),
                seed=number,
            )
        )
    return requests


async def test_500_prompts_through_tiny_pools_have_their_texts_and_aborts_change_none() -> None:
    # known_faults B133, B135
    requests = make_mix(500)
    places = asyncio.Semaphore(16)
    rng = random.Random(6)
    num_finished = num_aborted = 0
    transfer = transfer_config(TransportKind.TCP)
    prefill, decode = (make_digest_engine(MODEL, num_blocks=40) for _ in range(2))
    async with running_pair(transfer, prefill=prefill, decode=decode) as pair:

        async def one(request: Request, aborts_after: int | None) -> None:
            nonlocal num_finished, num_aborted
            async with places, asyncio.timeout(10.0), pair.replayer.open(request) as stream:
                tokens: list[int] = []
                async for delta in stream:
                    tokens += delta.token_ids
                    if aborts_after is not None and len(tokens) > aborts_after:
                        num_aborted += 1
                        break
                expected = MODEL.generate(request)
                assert tokens == expected[: len(tokens)]
                if aborts_after is None or len(expected) <= aborts_after:
                    assert tokens == expected
                    num_finished += 1

        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                aborts_after = rng.randint(0, 20) if rng.random() < 0.1 else None
                tasks.create_task(one(request, aborts_after))
        assert num_aborted > 20
        assert num_finished == len(requests) - num_aborted
        assert decode.scheduler.num_preemptions > 0
        await assert_clean(pair.prefill, pair.decode)


async def test_a_slow_reader_holds_up_neither_the_engine_nor_another_stream() -> None:
    # known_faults B049
    slow, quick = (make_request(name, [10, 11, 12], max_tokens=200, seed=3) for name in ("slow", "quick"))
    async with (
        running_controller() as controller,
        running_worker(controller) as worker,
        running_replayer(controller) as replayer,
    ):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        async with replayer.open(slow) as stream:
            deltas = aiter(stream)
            tokens = [*(await anext(deltas)).token_ids]
            assert (await generate(replayer, quick))[0] == MODEL.generate(quick)
            # The engine has finished the slow one too; its tokens wait for their reader.
            await eventually(lambda: worker.load().num_running == 0, "the engine is done")
            async for delta in deltas:
                tokens += delta.token_ids
            assert tokens == MODEL.generate(slow)


async def test_a_link_that_died_in_silence_costs_one_reconnect_and_no_token() -> None:
    # known_faults B134: neither end is told; the data connection and the channel beside it are open and pass nothing.
    transfer = transfer_config(TransportKind.TCP, stall_s=0.5, streaming_timeout_s=0.7, queued_timeout_s=0.7)
    async with (
        running_black_hole() as channels,
        running_black_hole() as data,
        running_controller() as controller,
        running_replayer(controller) as replayer,
    ):

        def reach(endpoint: Endpoint) -> Endpoint:
            channels.target = endpoint
            return channels.endpoint

        async with running_worker(controller, name="prefill-0", transfer=transfer, reach=reach) as prefill:
            listener = prefill._ranks.local.transports.listener
            data.target = Endpoint(host=listener.host, port=listener.port)
            listener.port = data.endpoint.port
            async with running_worker(controller, name="decode-0", transfer=transfer) as decode:
                for number in range(2):
                    await eventually(lambda: replayer.dispatcher.has_worker and has_link(decode), "linked")
                    before = prefill.load().num_prefilled_tokens
                    warm = make_request(f"warm {number}", [20 + number] * 90, max_tokens=3)
                    assert (await generate(replayer, warm))[0] == MODEL.generate(warm)
                    assert prefill.load().num_prefilled_tokens == before + 90, "it went over the link"
                    channels.swallow()
                    data.swallow()
                    request = make_request(f"r {number}", [60 + number] * 90, max_tokens=5)
                    start_time = time.monotonic()
                    tokens, reason = await generate(replayer, request)
                    assert (tokens, reason) == (MODEL.generate(request), FinishReason.LENGTH)
                    # 2 s of silence end a channel; a stalled link ends its transfers sooner.
                    assert time.monotonic() - start_time < 5.0
                    await eventually(lambda: not has_link(decode), "the dead link is given up")
                assert channels.num_swallowed >= 2
                assert data.num_swallowed >= 2
                await assert_clean(prefill, decode)


async def test_300_streams_over_http_with_leaving_clients_never_stall(tmp_path: Path) -> None:
    # known_faults B135
    make_tokenizer().save_pretrained(tmp_path)
    rng = random.Random(7)
    places = asyncio.Semaphore(8)
    answered: list[int] = []
    num_left = 0
    transfer = transfer_config(TransportKind.SHM)
    async with running_pair(transfer) as pair, running_ingress(pair.controller, tmp_path) as client:

        async def one(number: int, *, leaves: bool) -> None:
            nonlocal num_left
            body = {
                "model": "tiny",
                "prompt": [10 + (number * 7 + place) % 480 for place in range(rng.choice((3, 40, 100)))],
                "max_tokens": 12,
                "stream": True,
                "ignore_eos": True,
            }
            async with places:
                try:
                    async with asyncio.timeout(rng.uniform(0.0, 0.01) if leaves else 10.0):
                        answer = await client.post("/v1/completions", json=body)
                except TimeoutError:
                    assert leaves, "a stream stalled"
                    num_left += 1
                else:
                    assert answer.text.rstrip().endswith("data: [DONE]")
                    answered.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                tasks.create_task(one(number, leaves=rng.random() < 0.05))
        assert num_left > 0
        assert len(answered) == 300 - num_left
        await assert_clean(pair.prefill, pair.decode)
