"""Joint placement: by predicted time, with cached prefixes, reservations, and a reason."""

import random
from dataclasses import replace

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.config import PlacementConfig
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.prefix_hash import unit_chain
from pdserve.cluster.base.route import Candidate, Placeable, PrefixChain, Route
from pdserve.cluster.base.worker_info import LinkView, StepFit, TransferFit, WorkerLoad, WorkerState, WorkerView
from pdserve.cluster.control.fleet import SETTLE_S
from pdserve.cluster.control.placement import JointPlacement
from support.workers import make_view

FIT = StepFit(
    base=0.002,
    per_token=0.0001,
    per_row=0.0001,
    per_context_kilotoken=0.001,
    num_observations=200.0,
    relative_error=0.05,
)
LOAD = WorkerLoad(step_fit=FIT, num_free_blocks=10_000, num_blocks=10_000)
SLOW = replace(FIT, base=0.02, per_token=0.001, per_row=0.001)


def make_placement(*views: WorkerView, seed: int = 1, **settings: float) -> tuple[JointPlacement, ManualClock]:
    clock = ManualClock()
    placement = JointPlacement(PlacementConfig.model_validate(settings), clock, random.Random(seed))
    for view in views:
        placement.updated(view)
    return placement, clock


def pools(num_prefill: int, num_decode: int, load: WorkerLoad = LOAD) -> list[WorkerView]:
    prefills = [make_view(f"prefill-{number}", load) for number in range(num_prefill)]
    return prefills + [make_view(f"decode-{number}", load) for number in range(num_decode)]


def request(
    num_tokens: int = 400, *, max_tokens: int = 64, attempt: int = 0, limit_s: float | None = None, first: int = 0
) -> Placeable:
    token_ids = range(first, first + num_tokens)
    identity = make_view("decode-0").info.prefix_identity
    return Placeable(
        request_id=RequestId("r"),
        attempt=attempt,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        chains=(PrefixChain(identity=identity, names=unit_chain(identity, token_ids)),),
        ttft_limit_s=limit_s,
    )


def hold(placement: JointPlacement, worker: str, wanted: Placeable, num_tokens: int) -> None:
    """Let a worker's cache hold the beginning of a prompt."""
    update = CacheUpdate(
        worker_id=WorkerId(worker),
        incarnation=make_view(worker).info.incarnation,
        first_no=0,
        next_no=1,
        is_snapshot=True,
        stored=wanted.chains[0].names[: num_tokens // 16 * 16],
        evicted=b"",
    )
    assert placement.cache_changed(update)


def best_of(route: Route) -> tuple[str, str]:
    return str(route.worker_ids[0]), str(next(iter(route.prefill_worker_ids), "LOCAL"))


def chosen(placement: JointPlacement) -> Candidate:
    (candidate,) = [found for found in placement.decisions("r")[-1].candidates if found.is_chosen]
    return candidate


def test_queues_loads_and_speeds_decide_both_workers() -> None:
    placement, _ = make_placement(
        make_view("prefill-0", replace(LOAD, num_queued_prompt_tokens=3000)),
        make_view("prefill-1", LOAD),
        make_view("prefill-2", replace(LOAD, step_fit=SLOW)),
        make_view("decode-0", replace(LOAD, num_running=30, num_context_tokens=20_000)),
        make_view("decode-1", replace(LOAD, num_running=2, num_context_tokens=800)),
    )
    # Long enough for decode workers to be spared it.
    route = placement.choose(request(2000))
    assert best_of(route) == ("decode-1", "prefill-1")
    assert route.worker_ids == ("decode-1", "decode-0")
    assert route.prefill_worker_ids[:2] == ("prefill-1", "prefill-0") or route.prefill_worker_ids[1] == "prefill-2"
    assert route.predicted_ttft_s == pytest.approx(chosen(placement).ttft_s)
    # 2000 tokens in 4 steps of 512.
    assert chosen(placement).compute_s == pytest.approx(4 * (0.002 + 0.0001) + 2000 * 0.0001, rel=0.2)


def test_a_cached_prefix_draws_a_request_as_far_as_it_is_worth() -> None:
    wanted = request(1600)
    for queued, expected in ((0, "prefill-1"), (600, "prefill-1"), (2400, "prefill-0")):
        placement, _ = make_placement(
            make_view("prefill-0", LOAD),
            make_view("prefill-1", replace(LOAD, num_queued_prompt_tokens=queued)),
            make_view("decode-0", replace(LOAD, num_running=8, num_context_tokens=8000)),
        )
        hold(placement, "prefill-1", wanted, 1280)
        assert best_of(placement.choose(wanted)) == ("decode-0", expected), queued
    assert placement.decisions("r")[-1].candidates[0].num_cached_by_prefill == 0


def test_an_owner_that_holds_most_of_the_prompt_computes_the_rest_itself() -> None:
    wanted = request(1600)
    placement, _ = make_placement(*pools(2, 2))
    hold(placement, "decode-1", wanted, 1584)
    assert best_of(placement.choose(wanted)) == ("decode-1", "LOCAL")
    assert chosen(placement).num_cached_by_owner == 1584
    # Whatever names another identity gives them: nothing of it is known.
    other = replace(wanted.chains[0].identity, numerics_digest="other")
    placement, _ = make_placement(*pools(1, 1, replace(LOAD, num_running=8, num_context_tokens=8000)))
    hold(placement, "decode-0", wanted, 1584)
    placement.choose(replace(wanted, chains=(PrefixChain(identity=other, names=wanted.chains[0].names),)))
    assert {found.num_cached_by_owner for found in placement.decisions("r")[-1].candidates} == {0}


def test_a_long_prompt_is_kept_from_those_who_decode_unless_prefill_is_saturated() -> None:
    busy = replace(LOAD, num_running=16, num_context_tokens=8000)
    placement, _ = make_placement(make_view("prefill-0", LOAD), make_view("decode-0", busy))
    assert best_of(placement.choose(request(1600))) == ("decode-0", "prefill-0")
    idle, drowned = make_view("decode-0", LOAD), make_view("prefill-0", replace(LOAD, num_queued_prompt_tokens=40_000))
    placement, _ = make_placement(drowned, idle)
    assert best_of(placement.choose(request(1600))) == ("decode-0", "LOCAL")
    # The guard rules it out while something decodes there.
    one = make_view("decode-0", replace(LOAD, num_running=1, num_context_tokens=100))
    placement, _ = make_placement(drowned, one, itl_guard_s=0.02)
    assert best_of(placement.choose(request(1600))) == ("decode-0", "prefill-0")
    placement, _ = make_placement(drowned, idle, itl_guard_s=0.02)
    assert best_of(placement.choose(request(1600))) == ("decode-0", "LOCAL")


def test_what_was_sent_counts_until_reports_have_it() -> None:
    placement, clock = make_placement(*pools(3, 1, replace(LOAD, num_running=8, num_context_tokens=8000)))
    first = [best_of(placement.choose(request(1600, first=1000 * number)))[1] for number in range(3)]
    assert sorted(first) == ["prefill-0", "prefill-1", "prefill-2"]
    # A report that may be older than what was sent changes nothing; one long after does, if nothing arrived.
    for advance_s, num_queued in ((SETTLE_S / 2, 1600), (SETTLE_S, 0)):
        clock.advance(advance_s)
        for view in pools(3, 1):
            placement.updated(view)
        queue_s = placement.choose(replace(request(16), excluded=(WorkerId("decode-9"),)))
        assert queue_s.worker_ids
        queued = [found.queue_s for found in placement.decisions("r")[-1].candidates if found.prefill is not None]
        assert (min(queued) > 0.1) == (num_queued > 0)


def test_an_arrival_that_a_report_counts_ends_a_reservation() -> None:
    placement, _ = make_placement(make_view("mixed-0", LOAD))
    queues = []
    for number, num_arrivals in enumerate((0, 0, 1, 3)):
        placement.updated(make_view("mixed-0", replace(LOAD, num_arrivals=num_arrivals)))
        placement.choose(request(100, first=1000 * number))
        queues.append(placement.decisions("r")[-1].candidates[0].queue_s)
    # Before each: none, one, then again one of two, none of two.
    assert queues[0] == queues[3] == 0.0
    assert queues[1] == pytest.approx(queues[2])
    assert queues[1] > 0.0


def test_requests_of_one_prefix_that_come_together_go_to_one_place() -> None:
    # Waiting for the first one's prompt is as quick as computing it elsewhere, and others are busy with something.
    views = pools(4, 1, replace(LOAD, num_running=15, num_context_tokens=8000, num_queued_prompt_tokens=300))
    placement, _ = make_placement(make_view("prefill-0", LOAD), *views[1:])
    shared = request(1600)
    places = [best_of(placement.choose(replace(shared, request_id=RequestId(f"r-{number}"))))[1] for number in range(3)]
    assert set(places) == {"prefill-0"}


def test_equals_are_chosen_by_chance() -> None:
    placement, clock = make_placement(*pools(2, 4))
    owners = set()
    for number in range(40):
        owners.add(best_of(placement.choose(request(40, first=1000 * number)))[0])
        clock.advance(1.0)
        for view in pools(2, 4):
            placement.updated(view)
    assert len(owners) == 4


def test_a_full_owner_is_passed_by_and_its_wait_predicted() -> None:
    full = replace(LOAD, num_running=16, num_context_tokens=1000, num_free_blocks=0)
    free = replace(full, num_free_blocks=1000)
    placement, _ = make_placement(
        make_view("prefill-0", LOAD), make_view("decode-0", full), make_view("decode-1", free)
    )
    # Both run as many as they can; by the end of the prompt some will have ended, but not enough KV be free.
    route = placement.choose(request(6000))
    assert route.worker_ids[0] == "decode-1"
    rooms = {found.owner: found.room_s for found in placement.decisions("r")[-1].candidates}
    assert rooms[WorkerId("decode-0")] > 0 == rooms[WorkerId("decode-1")]


def test_links_that_are_closed_or_slow_count() -> None:
    def link(peer: str, state: str) -> LinkView:
        return LinkView(
            peer=WorkerId(peer),
            transport="tcp",
            state=state,
            source_rank=0,
            sink_rank=0,
            num_transfers=0,
            num_bytes=0,
            note="",
        )

    def fit(source: str, per_byte: float) -> TransferFit:
        return TransferFit(
            source=WorkerId(source), latency=0.001, per_byte=per_byte, num_observations=50.0, relative_error=0.1
        )

    busy = replace(LOAD, num_running=8, num_context_tokens=8000)
    decode = replace(
        busy, links=(link("prefill-0", "connecting"), link("prefill-1", "open"), link("prefill-2", "open"))
    )
    prefills = [make_view(f"prefill-{number}", LOAD) for number in range(3)]
    placement, _ = make_placement(*prefills, make_view("decode-0", decode))
    assert "prefill-0" not in best_of(placement.choose(request(1600)))
    # 1600 tokens of 1024 bytes: 0.16 s at 10 MB/s, of which computing hides a part.
    slow = replace(decode, transfer_fits=(fit("prefill-1", 1e-6), fit("prefill-2", 1e-10)))
    placement, _ = make_placement(*prefills, make_view("decode-0", slow))
    assert best_of(placement.choose(request(1600)))[1] == "prefill-2"
    transfers = {found.prefill: found.transfer_s for found in placement.decisions("r")[-1].candidates}
    assert transfers[WorkerId("prefill-1")] > 1.0
    assert transfers[WorkerId("prefill-0")] == float("inf")


def test_a_request_that_would_be_late_is_refused_with_the_prediction() -> None:
    loads = replace(LOAD, num_queued_prompt_tokens=20_000)
    placement, _ = make_placement(*pools(1, 1, loads))
    route = placement.choose(request(400, limit_s=1.0))
    assert route.worker_ids == ()
    assert route.refusal is not None
    assert "limit is 1000 ms" in route.refusal.reason
    assert route.predicted_ttft_s == pytest.approx(2.1, rel=0.1)
    assert route.refusal.retry_after_s == pytest.approx(route.predicted_ttft_s - 1.0)
    assert not any(found.is_chosen for found in placement.decisions("r")[-1].candidates)
    assert placement.choose(request(400, limit_s=3.0)).worker_ids
    assert placement.choose(request(400, limit_s=0.1, attempt=1)).worker_ids, "what has begun goes on"
    assert placement.choose(request(400)).worker_ids
    # A prediction that is worth nothing refuses nobody.
    unsure = replace(loads, step_fit=replace(FIT, relative_error=0.9))
    placement, _ = make_placement(*pools(1, 1, unsure))
    assert placement.choose(request(400, limit_s=1.0)).worker_ids


def test_a_worker_with_few_steps_borrows_the_law_of_the_others() -> None:
    new = replace(LOAD, step_fit=StepFit(per_token=1e-9, num_observations=0.0))
    placement, _ = make_placement(
        make_view("prefill-0", new), make_view("prefill-1", LOAD), make_view("decode-0", LOAD)
    )
    placement.choose(request(4000))
    computes = {found.prefill: found.compute_s for found in placement.decisions("r")[-1].candidates if found.prefill}
    assert computes[WorkerId("prefill-0")] == pytest.approx(computes[WorkerId("prefill-1")])
    # And where nobody has measured anything, load decides.
    unknown = WorkerLoad(num_free_blocks=1000, num_blocks=1000)
    placement, _ = make_placement(
        make_view("mixed-0", replace(unknown, num_queued_prompt_tokens=900)), make_view("mixed-1", unknown)
    )
    assert placement.choose(request(100)).worker_ids == ("mixed-1", "mixed-0")


def test_workers_that_are_not_ready_excluded_or_gone_are_not_chosen() -> None:
    placement, _ = make_placement(
        make_view("decode-0", LOAD, WorkerState.DRAINING),
        *pools(2, 0),
        make_view("decode-1", LOAD),
        make_view("mixed-0"),
    )
    excluded = replace(request(), excluded=(WorkerId("mixed-0"), WorkerId("never-seen")))
    assert placement.choose(excluded).worker_ids == ("decode-1",)
    placement.removed(WorkerId("prefill-0"))
    placement.removed(WorkerId("decode-1"))
    placement.removed(WorkerId("decode-1"))
    assert placement.choose(request()).worker_ids == ("mixed-0",)
    assert placement.choose(excluded) == Route(worker_ids=(), reason="no worker is ready")


def test_places_are_kept_right_whatever_comes_and_goes() -> None:
    rng = random.Random(4)
    placement, clock = make_placement()
    present: dict[str, WorkerView] = {}
    for _ in range(600):
        name = f"{rng.choice(('prefill', 'decode', 'mixed'))}-{rng.randrange(12)}"
        if rng.random() < 0.3:
            present.pop(name, None)
            placement.removed(WorkerId(name))
        else:
            load = replace(LOAD, num_queued_prompt_tokens=rng.randrange(10_000), num_running=rng.randrange(16))
            present[name] = make_view(name, load)
            placement.updated(present[name])
        clock.advance(rng.random())
        fleet = placement.fleet
        assert {str(worker_id) for worker_id in fleet.ids} == set(present)
        assert [view.info.worker_id for view in fleet.views] == fleet.ids
        route = placement.choose(request(rng.randrange(1, 3000)))
        owners = {name for name, view in present.items() if view.info.role.owns_requests}
        assert bool(route.worker_ids) == bool(owners)
        assert set(route.worker_ids) <= owners
        assert {str(found) for found in route.prefill_worker_ids} <= set(present) - owners
