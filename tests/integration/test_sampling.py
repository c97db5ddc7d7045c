"""Sampling parameters on real models: against transformers, and equal however a request is run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.request import FinishReason, Request, TokenBias, TokenLogprobs
from pdserve.router.replay import Replayer
from pdserve.workers.assembly import AssembledEngine
from pdserve.workers.engine.engine import Engine
from support.bits import plain_engine
from support.engines import make_engine, make_request, prompts_of
from support.services import eventually, running_controller, running_replayer, running_worker

EVERYTHING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": (TokenBias(token_id=20, bias=3.0), TokenBias(token_id=21, bias=-100.0)),
    "min_tokens": 6,
    "stop_token_ids": tuple(range(100, 140)),
    "num_logprobs": 3,
    "num_prompt_logprobs": 2,
}


@dataclass
class Outcome:
    """Everything that one request produced."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason | None


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, Outcome]:
    outcomes = {str(request.request_id): Outcome([], [], (), None) for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while engine.has_work:
        for delta in engine.step():
            outcome = outcomes[delta.request_id]
            outcome.tokens += delta.token_ids
            outcome.logprobs += delta.logprobs
            outcome.prompt_logprobs += delta.prompt_logprobs
            outcome.reason = delta.finish_reason
        engine.scheduler.validate()
    assert engine.pool.is_all_free
    return outcomes


def requests_of(lengths: Sequence[int], **changes: object) -> list[Request]:
    return [
        make_request(str(seed), prompt, seed=seed, max_tokens=16, **{**EVERYTHING, **changes})  # type: ignore[arg-type]
        for seed, prompt in enumerate(prompts_of(lengths), start=1)
    ]


@pytest.fixture(scope="module")
def assembled(tiny_checkpoints: dict[str, Path]) -> AssembledEngine:
    return make_engine(tiny_checkpoints["gemma3"])


def test_logprobs_of_prompt_and_output_are_those_of_transformers(
    assembled: AssembledEngine, tiny_checkpoints: dict[str, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_checkpoints["gemma3"]), dtype=torch.float32).eval()
    requests = requests_of((1, 17, 70))
    for request, outcome in zip(requests, run_all(plain_engine(assembled), requests).values(), strict=True):
        tokens = [*request.prompt_token_ids, *outcome.tokens]
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
        entries = [*outcome.prompt_logprobs, *outcome.logprobs]
        assert len(entries) == len(tokens) - 1
        for place, entry in enumerate(entries):
            assert entry.chosen.token_id == tokens[place + 1]
            assert abs(entry.chosen.logprob - float(expected[place, tokens[place + 1]])) < 1e-3
            assert len(entry.top) == (2 if place < len(outcome.prompt_logprobs) else 3)
            best = expected[place].topk(len(entry.top)).values
            assert np.abs(np.array([item.logprob for item in entry.top]) - best.numpy()).max() < 1e-3


def test_everything_is_equal_alone_in_a_crowd_in_chunks_and_after_preemption(assembled: AssembledEngine) -> None:
    requests = requests_of((3, 16, 40, 33, 90, 64))
    alone: dict[str, Outcome] = {}
    for request in requests:
        alone |= run_all(plain_engine(assembled), [request])
    assert len({tuple(outcome.tokens) for outcome in alone.values()}) == len(requests)
    crowd = [
        make_request(f"other {number}", prompt, max_tokens=20) for number, prompt in enumerate(prompts_of((5, 60)))
    ]
    for limits in ({"max_batch_tokens": 7}, {"max_batch_tokens": 512}, {"num_blocks": 10}):
        engine = plain_engine(assembled, **limits)
        found = run_all(engine, [*crowd, *requests])
        assert {name: found[name] for name in alone} == alone
        assert engine.scheduler.num_preemptions > 0 or "num_blocks" not in limits


def test_a_replay_at_any_token_gives_the_rest(assembled: AssembledEngine) -> None:
    (request,) = requests_of((30,), stop_token_ids=())
    whole = run_all(plain_engine(assembled), [request])["1"]
    assert len(whole.tokens) == 16
    for count in range(1, 16):
        resumed = replace(request, resume_token_ids=tuple(whole.tokens[:count]))
        rest = run_all(plain_engine(assembled), [resumed])["1"]
        assert rest.tokens == whole.tokens[count:]
        assert rest.logprobs == whole.logprobs[count:]
        assert rest.prompt_logprobs == ()


def test_prompt_logprobs_are_the_same_when_the_prompt_is_cached(assembled: AssembledEngine) -> None:
    # known_faults B015
    engine = plain_engine(assembled, max_batch_tokens=40)
    text = prompts_of([140])[0]
    cold, again, longer, shorter = (
        run_all(engine, [make_request(name, text[:length], max_tokens=1, num_prompt_logprobs=5, num_logprobs=5)])[name]
        for name, length in (("cold", 67), ("again", 67), ("longer", 140), ("shorter", 40))
    )
    assert len(cold.prompt_logprobs) == 66
    assert again == cold
    assert longer.prompt_logprobs[:66] == cold.prompt_logprobs
    assert shorter.prompt_logprobs == cold.prompt_logprobs[:39]
    plain = make_request("plain", text[:67], max_tokens=1)
    run_all(engine, [plain])
    assert engine.scheduler.num_cached_prompt_tokens == 64, "others still hit"


def test_biases_bans_and_stop_tokens_decide_as_they_say(assembled: AssembledEngine) -> None:
    engine = plain_engine(assembled)
    prompt = prompts_of([20])[0]
    forced = make_request("forced", prompt, max_tokens=4, logit_bias=(TokenBias(token_id=77, bias=100.0),))
    early = replace(forced, sampling=replace(forced.sampling, stop_token_ids=(77,)))
    late = replace(forced, sampling=replace(forced.sampling, stop_token_ids=(77,), min_tokens=3))
    assert run_all(engine, [forced])["forced"].tokens == [77] * 4
    outcome = run_all(engine, [early])["forced"]
    assert (outcome.tokens, outcome.reason) == ([77], FinishReason.STOP)
    outcome = run_all(engine, [late])["forced"]
    assert (len(outcome.tokens), outcome.tokens[-1], outcome.reason) == (4, 77, FinishReason.STOP)
    assert 77 not in outcome.tokens[:3]


async def outcome_of(replayer: Replayer, request: Request) -> Outcome:
    outcome = Outcome([], [], (), None)
    async with replayer.open(request) as run:
        async for delta in run:
            outcome.tokens += delta.token_ids
            outcome.logprobs += delta.logprobs
            outcome.prompt_logprobs += delta.prompt_logprobs
            outcome.reason = delta.finish_reason
    return outcome


async def test_everything_is_equal_disaggregated(assembled: AssembledEngine) -> None:
    # known_faults B078
    requests = [*requests_of((3, 16, 40, 90)), *requests_of((50,), min_tokens=0, num_prompt_logprobs=None)]
    requests = [replace(request, request_id=make_request(str(n), [0]).request_id) for n, request in enumerate(requests)]
    expected = list(run_all(plain_engine(assembled), requests).values())
    prefill, decode = plain_engine(assembled, max_batch_tokens=33), plain_engine(assembled)
    transfer = TransferConfig(slot_bytes=64 << 10)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, prefill, "prefill-0", stores=(prefill.runner.store,), transfer=transfer),  # type: ignore[attr-defined]
        running_worker(controller, decode, "decode-0", stores=(decode.runner.store,), transfer=transfer) as sink,  # type: ignore[attr-defined]
    ):
        await eventually(lambda: any(link.state == "open" for link in sink.load().links), "linked")
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        # Twice: the second time prefixes are cached on both sides.
        for turn in range(2):
            named = [
                replace(request, request_id=make_request(f"{turn}/{request.request_id}", [0]).request_id)
                for request in requests
            ]
            found = await asyncio.gather(*(outcome_of(replayer, request) for request in named))
            assert list(found) == expected


async def test_a_scored_prompt_that_is_cached_is_scored_wherever_it_is_computed(assembled: AssembledEngine) -> None:
    # The source refuses while the sink holds most of the prompt: the sink computes all of it.
    prompt = prompts_of([100])[0]
    request = make_request("r", prompt, max_tokens=4, num_logprobs=1, num_prompt_logprobs=1)
    (expected,) = run_all(plain_engine(assembled), [request]).values()
    prefill, decode = plain_engine(assembled), plain_engine(assembled)
    run_all(decode, [make_request("seed", prompt[:65], max_tokens=1)])
    transfer = TransferConfig(slot_bytes=64 << 10)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, prefill, "prefill-0", stores=(prefill.runner.store,), transfer=transfer) as source,  # type: ignore[attr-defined]
        running_worker(controller, decode, "decode-0", stores=(decode.runner.store,), transfer=transfer) as sink,  # type: ignore[attr-defined]
    ):
        await eventually(lambda: any(link.state == "open" for link in sink.load().links), "linked")
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        assert source._source is not None
        source._source._failure = "refuses"
        assert await outcome_of(replayer, request) == expected
