"""The scheduler over the digest model: any misplaced block changes the text."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.engine_config import VictimKind
from pdserve.cluster.base.errors import InvalidRequestError, OverloadedError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import FinishReason, Request, forks_of
from pdserve.workers.engine.strategies import Fair, FirstCome, Priority, ShortestPrefill, Strategy
from pdserve.workers.model.digest import DigestModel
from support.engines import make_digest_engine, make_request, prompts_of, run
from support.runners import BlindRunner

MODEL = DigestModel()
STRATEGIES: list[Callable[[], Strategy]] = [
    FirstCome,
    Priority,
    lambda: ShortestPrefill(20.0),
    lambda: Fair({"a": 2.0, "b": 0.5}),
]
Limits = dict[str, Any]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Request], Limits]:
    block_size = draw(st.sampled_from((16, 32)))
    num_blocks = draw(st.integers(3, 14))
    limits: Limits = {
        "strategy": draw(st.sampled_from(STRATEGIES))(),
        "victim": draw(st.sampled_from(list(VictimKind))),
        "skip_age_s": draw(st.sampled_from((0.0, 1.0, 1e9))),
        "has_prefix_cache": draw(st.booleans()),
        "host_blocks": draw(st.sampled_from((0, 2, 50))),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_running": draw(st.integers(1, 6)),
        "max_batch_tokens": draw(st.integers(1, 70)),
    }
    # Some prompts begin alike, so that the prefix cache has hits.
    texts = [prompts_of([256], seed=seed)[0] for seed in range(draw(st.integers(1, 3)))]
    requests = []
    for number in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, min(60, num_blocks * block_size - 4)))
        room = num_blocks * block_size - length
        max_tokens = draw(st.integers(1, min(40, room)))
        resume = draw(st.integers(0, min(3, max_tokens - 1)))
        requests.append(
            make_request(
                str(number),
                texts[number % len(texts)][:length],
                max_tokens=max_tokens,
                temperature=draw(st.sampled_from((0.0, 1.0))),
                seed=draw(st.integers(0, 2**63)),
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from("abc")),
                resume=prompts_of([resume], seed=100 + number)[0] if resume else (),
                forks=draw(st.integers(0, 3)) if not resume else 0,
            )
        )
    return requests, limits


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_every_text_is_the_definitions_text(workload: tuple[list[Request], Limits]) -> None:
    requests, limits = workload
    clock = ManualClock()
    engine = make_digest_engine(MODEL, clock=clock, **limits)
    outputs = run(engine, requests, clock=clock)
    for request in requests:
        for sample in (request, *forks_of(request)):
            assert outputs[sample.request_id] == MODEL.generate(sample)
    assert engine.pool.is_all_free
    assert engine.scheduler.num_queued_prompt_tokens == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.data())
def test_aborts_at_any_step_leave_neighbours_and_pool_intact(
    workload: tuple[list[Request], Limits], data: st.DataObject
) -> None:
    requests, limits = workload
    clock = ManualClock()
    engine = make_digest_engine(MODEL, clock=clock, **limits)
    samples = [sample for request in requests for sample in (request, *forks_of(request))]
    outputs: dict[str, list[int]] = {sample.request_id: list(sample.resume_token_ids) for sample in samples}
    waiting, aborted = list(requests), set()
    while waiting or engine.scheduler.has_work:
        action = data.draw(st.integers(0, 3))
        clock.advance(0.3)
        if waiting and action != 1:
            engine.scheduler.add(waiting.pop())
        elif action == 1 and len(aborted) < len(samples) - 1:
            victim = data.draw(st.sampled_from(samples))
            if engine.scheduler.abort(victim.request_id, victim.attempt):
                aborted.add(victim.request_id)
        for delta in engine.step():
            assert delta.request_id not in aborted
            outputs[delta.request_id].extend(delta.token_ids)
        engine.scheduler.validate()
    for sample in samples:
        name = sample.request_id
        # A fork whose first sample was aborted before its prompt was computed never began.
        has_begun = not sample.sample or name.partition(".")[0] not in aborted or outputs[name]
        if name not in aborted and has_begun:
            assert outputs[name] == MODEL.generate(sample)
    assert engine.pool.is_all_free


def test_two_growing_requests_in_a_pool_for_one_both_finish_through_preemption() -> None:
    # known_faults B037: seven blocks, two requests of 34 + 35 tokens; ten blocks as the undisturbed reference.
    requests = [
        make_request(str(n), prompts_of([34], seed=n)[0], max_tokens=35, temperature=float(n), seed=5) for n in (0, 1)
    ]
    tight, roomy = make_digest_engine(MODEL, num_blocks=7), make_digest_engine(MODEL, num_blocks=10)
    assert run(tight, requests) == run(roomy, requests)
    assert tight.scheduler.num_preemptions >= 1
    assert roomy.scheduler.num_preemptions == 0


def test_the_oldest_is_never_put_back() -> None:
    engine = make_digest_engine(MODEL, num_blocks=6, max_batch_tokens=16)
    order = []
    for number in range(4):
        engine.scheduler.add(make_request(str(number), prompts_of([20], seed=number)[0], max_tokens=60))
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    assert order == ["0", "1", "2", "3"]
    assert engine.scheduler.num_preemptions > 0


def test_decodes_come_before_prefill_chunks() -> None:
    engine = make_digest_engine(MODEL, max_batch_tokens=10)
    engine.scheduler.add(make_request("decoding", prompts_of([4])[0], max_tokens=30))
    engine.step()
    engine.scheduler.add(make_request("long", prompts_of([100], seed=1)[0], max_tokens=5))
    for _ in range(8):
        assert [delta.request_id for delta in engine.step()] == ["decoding"]


def test_a_step_never_exceeds_its_budget() -> None:
    engine = make_digest_engine(MODEL, max_batch_tokens=7)
    for number in range(12):
        engine.scheduler.add(make_request(str(number), prompts_of([9], seed=number)[0], max_tokens=6))
    while engine.has_work:
        plan = engine.scheduler.schedule()
        assert plan is not None
        assert 0 < plan.num_tokens <= 7
        engine.scheduler.update(engine.runner.execute(plan))
        engine.scheduler.validate()


def test_a_request_larger_than_the_pool_is_refused_naming_the_field() -> None:
    engine = make_digest_engine(MODEL, num_blocks=4)
    with pytest.raises(InvalidRequestError, match="need 65 tokens, this worker holds 64") as caught:
        engine.scheduler.add(make_request("0", prompts_of([60])[0], max_tokens=5))
    assert caught.value.param == "max_tokens"
    engine.scheduler.add(make_request("1", prompts_of([60])[0], max_tokens=4))
    assert engine.scheduler.num_waiting == 1


def test_a_full_queue_and_a_second_copy_are_refused() -> None:
    engine = make_digest_engine(MODEL, max_running=2, max_waiting=1)
    for number in range(3):  # two can be admitted by the next step, one waits
        engine.scheduler.add(make_request(str(number), [10]))
    with pytest.raises(InvalidRequestError, match="already here"):
        engine.scheduler.add(make_request("0", [10]))
    with pytest.raises(OverloadedError):
        engine.scheduler.add(make_request("3", [10]))


def test_end_tokens_and_stop_tokens_end_with_stop_and_the_limit_with_length() -> None:
    first = MODEL.generate(make_request("0", [10, 11], max_tokens=4))
    engine = make_digest_engine(MODEL)
    request = make_request("0", [10, 11], max_tokens=9, ignore_eos=True, stop_token_ids=(first[2],))  # type: ignore[arg-type]
    engine.scheduler.add(request)
    deltas = [delta for _ in range(3) for delta in engine.step()]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    engine.scheduler.add(make_request("1", [10, 11], max_tokens=1))
    assert engine.step()[0].finish_reason is FinishReason.LENGTH
    assert not engine.scheduler.has_work


def test_queue_times_are_from_arrival_to_first_admission() -> None:
    clock = ManualClock()
    engine = make_digest_engine(MODEL, max_running=1, clock=clock)
    engine.scheduler.add(make_request("0", [10], max_tokens=1))
    engine.scheduler.add(make_request("1", [10], max_tokens=1))
    clock.advance(2.0)
    engine.step()
    clock.advance(1.0)
    engine.step()
    assert engine.scheduler.take_queue_times() == [2.0, 3.0]
    assert engine.scheduler.take_queue_times() == []


def test_aborting_what_is_not_here_says_so() -> None:
    engine = make_digest_engine(MODEL)
    assert not engine.scheduler.abort(RequestId("nobody"), 0)


def test_resume_tokens_count_as_output_and_are_not_sampled_again() -> None:
    whole = MODEL.generate(make_request("0", [10, 11, 12], max_tokens=10, temperature=1.0, seed=3))
    engine = make_digest_engine(MODEL)
    resumed = make_request("0", [10, 11, 12], max_tokens=10, temperature=1.0, seed=3, resume=whole[:4])
    assert run(engine, [resumed])["0"] == whole


def test_waste_is_the_unfilled_end_and_what_the_window_has_left() -> None:
    # The groups of MODEL see everything, and 24 tokens.
    engine = make_digest_engine(MODEL)
    engine.scheduler.add(make_request("0", prompts_of([41])[0], max_tokens=30))
    for num_tokens in range(42, 70):
        engine.step()
        num_computed = num_tokens - 1
        end = -(-num_computed // 16) * 16
        full, window = engine.scheduler.slot_use(0), engine.scheduler.slot_use(1)
        assert (full.num_held, full.num_wasted) == (end, max(0, end - num_tokens))
        assert window.num_held - window.num_wasted == min(end, num_tokens) - (num_computed - 23)


def test_a_batch_of_ordinary_prompts_wastes_less_than_four_percent_of_its_blocks() -> None:
    engine = make_digest_engine(MODEL, num_blocks=4000, max_running=32, max_batch_tokens=8192)
    rng = random.Random(0)
    for number in range(32):
        length = int(min(3000, rng.lognormvariate(6.2, 0.8)))
        engine.scheduler.add(make_request(str(number), prompts_of([length], seed=number)[0], max_tokens=60))
    held = wasted = 0
    while engine.has_work:
        engine.step()
        use = engine.scheduler.slot_use(0)
        held, wasted = held + use.num_held, wasted + use.num_wasted
    assert 0 < wasted < 0.04 * held


def test_blocks_that_a_transfer_still_reads_cost_a_few_preemptions_and_no_cycle() -> None:
    # known_faults B041: what is put back gives nothing while its blocks are pinned.
    engine = make_digest_engine(MODEL, num_blocks=34, max_running=9, has_prefix_cache=False)
    requests = [make_request(str(n), prompts_of([50], seed=n)[0], max_tokens=40) for n in range(8)]
    for request in requests:
        engine.scheduler.add(request)
    texts: dict[str, list[int]] = {str(n): [] for n in range(9)}
    while engine.scheduler.num_waiting:
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
    pinned = [np.flatnonzero(engine.pool.references(group)).astype(np.int32) for group in range(2)]
    for group, blocks in enumerate(pinned):
        engine.pool.pin(group, blocks)
    requests.append(make_request("8", prompts_of([50], seed=8)[0], max_tokens=40))
    engine.scheduler.add(requests[-1])
    for _ in range(200):
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
    assert 0 < engine.scheduler.num_preemptions <= 8
    for group, blocks in enumerate(pinned):
        engine.pool.unpin(group, blocks)
    while engine.has_work:
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
    assert texts == {request.request_id: MODEL.generate(request) for request in requests}
    assert engine.pool.is_all_free


def test_a_request_without_finite_logits_ends_with_an_error_and_its_neighbours_go_on() -> None:
    engine = make_digest_engine(MODEL, has_prefix_cache=False)
    engine.runner = BlindRunner(MODEL, num_blocks=engine.pool.num_blocks, block_size=16)
    good = make_request("good", prompts_of([30])[0], max_tokens=10)
    for request in (good, make_request("bad", [500, 20, 30], max_tokens=10)):
        engine.scheduler.add(request)
    tokens: list[int] = []
    endings = {}
    while engine.has_work:
        for delta in engine.step():
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                endings[delta.request_id] = (delta.finish_reason, delta.error)
        engine.scheduler.validate()
    assert tokens == MODEL.generate(good)
    assert endings["good"] == (FinishReason.LENGTH, None)
    assert endings["bad"] == (FinishReason.ERROR, "the model's output for this request is not finite")
    assert engine.pool.is_all_free
