"""Who comes first: each strategy's promise, over the digest model."""

from itertools import count

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.errors import OverloadedError
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.strategies import INPUT_WEIGHT, OUTPUT_WEIGHT, Fair, Priority, ShortestPrefill
from pdserve.workers.model.digest import DigestModel
from support.engines import make_digest_engine, make_request, prompts_of

MODEL = DigestModel()


def add(engine: Engine, name: str, length: int, max_tokens: int = 4, **fields: object) -> Request:
    request = make_request(name, prompts_of([length], seed=len(name) + length)[0], max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    engine.scheduler.add(request)
    return request


def first_steps(engine: Engine, clock: ManualClock | None = None, most: int = 1000) -> dict[str, int]:
    """Run to the end; return the step of each request's first token."""
    found: dict[str, int] = {}
    for step in range(most):
        if not engine.scheduler.has_work:
            return found
        for delta in engine.step():
            found.setdefault(delta.request_id, step)
        engine.scheduler.validate()
        if clock is not None:
            clock.advance(0.1)
    return found


def test_a_more_urgent_request_takes_a_running_ones_place_and_the_victim_goes_on() -> None:
    # known_faults B047
    engine = make_digest_engine(MODEL, max_running=4, strategy=Priority(), num_blocks=128, max_batch_tokens=128)
    low = [add(engine, f"low {n}", 20, 200, priority=5) for n in range(4)]
    outputs: dict[str, list[int]] = {}

    def step() -> list[str]:
        deltas = engine.step()
        engine.scheduler.validate()
        for delta in deltas:
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        return [delta.request_id for delta in deltas]

    for _ in range(10):
        step()
    high = add(engine, "high", 20, 30, priority=1)
    assert "high" in step(), "it starts at once"
    assert engine.scheduler.num_preemptions == 1
    more = [add(engine, f"more {n}", 10, 3, priority=5) for n in range(50)]
    add(engine, "equal", 10, 3, priority=1)
    while engine.has_work:
        step()
    for request in (*low, high, *more):
        assert outputs[request.request_id] == MODEL.generate(request)
    assert engine.scheduler.num_preemptions == 2, "the second for `equal`; equals take no place from each other"


def test_equal_priorities_keep_their_order_after_a_preemption() -> None:
    # known_faults B047
    engine = make_digest_engine(MODEL, num_blocks=6, max_batch_tokens=16, strategy=Priority())
    order = []
    for number in range(4):
        add(engine, str(number), 20, 60)
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    assert order == ["0", "1", "2", "3"]
    assert engine.scheduler.num_preemptions > 0


def test_short_prompts_pass_a_long_one_which_is_not_starved() -> None:
    # known_faults B046, both ways
    clock = ManualClock()
    engine = make_digest_engine(
        MODEL, num_blocks=512, max_batch_tokens=64, clock=clock, strategy=ShortestPrefill(200.0), max_running=32
    )
    add(engine, "long", 6400, 1)
    engine.step()
    for number in range(10):
        add(engine, f"short {number}", 20, 1)
    found = first_steps(engine, clock)
    assert max(step for name, step in found.items() if name != "long") < 8
    # A steady stream of short prompts that alone would fill every step: the long one ages and finishes.
    engine = make_digest_engine(
        MODEL, num_blocks=512, max_batch_tokens=64, clock=clock, strategy=ShortestPrefill(200.0), max_running=32
    )
    add(engine, "long", 1280, 1)
    numbers = count()
    for step in range(300):  # noqa: B007 — read after the loop
        for _ in range(4):
            if engine.scheduler.num_waiting < 100:
                add(engine, f"s{next(numbers)}", 20, 1)
        if "long" in [delta.request_id for delta in engine.step()]:
            break
        clock.advance(0.1)
    assert step < 150


def test_service_of_backlogged_tenants_differs_by_no_more_than_the_published_bound() -> None:
    # Sheng et al., OSDI 2024, theorem 4.4: two tenants with requests always waiting, one three times as fast.
    num_blocks = 24
    strategy = Fair({})
    engine = make_digest_engine(MODEL, num_blocks=num_blocks, max_running=8, max_batch_tokens=64, strategy=strategy)
    service = {"polite": 0.0, "greedy": 0.0}
    longest, numbers = 60, count()
    bound = 2 * max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * num_blocks * 16)
    waiting = {"polite": 0, "greedy": 0}
    most = 0.0
    for step in range(1500):
        for tenant, rate in (("polite", 1), ("greedy", 3)):
            while waiting[tenant] < 4 * rate:
                number = next(numbers)
                length = 10 + number * 37 % (longest - 10)
                add(engine, f"{tenant} {number}", length, 5 + number % 30, tenant=tenant)
                waiting[tenant] += 1
        before = engine.scheduler.num_preemptions
        for delta in engine.step():
            tenant = delta.request_id.partition(" ")[0]
            if delta.index == 0:
                waiting[tenant] -= 1
                length = 10 + int(delta.request_id.partition(" ")[2]) * 37 % (longest - 10)
                service[tenant] += INPUT_WEIGHT * (length - delta.num_cached_tokens)
            service[tenant] += OUTPUT_WEIGHT
        engine.scheduler.validate()
        assert engine.scheduler.num_preemptions >= before
        if step > 20:
            most = max(most, abs(service["polite"] - service["greedy"]))
    assert min(service.values()) > 4 * bound, "both were served for long"
    assert most <= bound


def test_under_fcfs_the_faster_tenant_gets_more() -> None:
    # So that the test above could fail.
    engine = make_digest_engine(MODEL, num_blocks=24, max_running=8)
    numbers = count()
    service = {"polite": 0, "greedy": 0}
    for _ in range(600):
        while engine.scheduler.num_waiting < 16:
            number = next(numbers)
            add(engine, f"{'polite' if number % 4 == 0 else 'greedy'} {number}", 20, 10)
        for delta in engine.step():
            service[delta.request_id.partition(" ")[0]] += 1
    assert service["greedy"] > 2 * service["polite"]


def test_weights_share_in_proportion_and_absence_earns_no_credit() -> None:
    strategy = Fair({"big": 3.0})
    engine = make_digest_engine(MODEL, num_blocks=64, max_running=4, strategy=strategy)
    numbers = count()
    tokens = {"big": 0, "small": 0}
    for _ in range(800):
        for tenant in tokens:
            while sum(item.request.tenant == tenant for item in engine.scheduler._waiting) < 4:
                add(engine, f"{tenant} {next(numbers)}", 20, 8, tenant=tenant)
        for delta in engine.step():
            tokens[delta.request_id.partition(" ")[0]] += 1
    assert 2.5 < tokens["big"] / tokens["small"] < 3.5
    add(engine, "late 0", 20, 8, tenant="late")
    assert strategy.counter("late") >= min(strategy.counter("big"), strategy.counter("small"))


def test_a_request_that_does_not_fit_is_passed_for_a_while_and_then_no_more() -> None:
    clock = ManualClock()
    engine = make_digest_engine(MODEL, num_blocks=16, max_running=8, clock=clock, skip_age_s=1.0)
    add(engine, "running", 100, 60)
    engine.step()
    add(engine, "large", 200, 4)
    add(engine, "small 0", 20, 4)
    assert "small 0" in [delta.request_id for delta in engine.step()]
    clock.advance(1.5)
    add(engine, "small 1", 20, 4)
    found = first_steps(engine, clock)
    assert found["large"] <= found["small 1"]
    strict = make_digest_engine(MODEL, num_blocks=16, max_running=8, skip_age_s=0.0)
    add(strict, "running", 100, 60)
    strict.step()
    add(strict, "large", 200, 4)
    add(strict, "small 0", 20, 4)
    assert "small 0" not in [delta.request_id for delta in strict.step()]


def test_the_queue_is_bounded_by_tokens_too() -> None:
    engine = make_digest_engine(MODEL, max_waiting_tokens=100)
    add(engine, "first", 500, 4)  # one of any size may wait
    with pytest.raises(OverloadedError, match="500 tokens wait"):
        add(engine, "second", 10, 4)
    engine.scheduler.abort(make_request("first", [0]).request_id, 0)
    add(engine, "third", 60, 4)
    add(engine, "fourth", 40, 4)
    with pytest.raises(OverloadedError):
        add(engine, "fifth", 1, 4)
    engine.scheduler.validate()


def test_what_two_low_requests_share_is_won_when_both_are_put_back() -> None:
    # Neither alone would give back the prompt that they share.
    engine = make_digest_engine(MODEL, num_blocks=40, strategy=Priority(), max_batch_tokens=512)
    low = make_request("low", prompts_of([480])[0], max_tokens=60, priority=5, forks=1)
    engine.scheduler.add(low)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == 2
    urgent = make_request("urgent", prompts_of([300], seed=9)[0], max_tokens=5)
    engine.scheduler.add(urgent)
    assert [delta.request_id for delta in engine.step()] == ["urgent"]
    engine.scheduler.validate()
