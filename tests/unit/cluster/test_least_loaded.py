"""Least-loaded placement and the ingress's fallback."""

import random
from collections.abc import Sequence

from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.route import Placeable
from pdserve.cluster.base.worker_info import WorkerLoad, WorkerState, WorkerView
from pdserve.cluster.control.least_loaded import LeastLoaded
from pdserve.router.fallback import choose_from_view
from support.workers import make_view


def make_least_loaded(views: Sequence[WorkerView]) -> LeastLoaded:
    placement = LeastLoaded()
    for view in views:
        placement.updated(view)
    return placement


def request(num_tokens: int, excluded: tuple[WorkerId, ...] = ()) -> Placeable:
    return Placeable(request_id=RequestId("r"), attempt=0, num_tokens=num_tokens, max_tokens=16, excluded=excluded)


A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def test_the_least_loaded_ready_worker_comes_first() -> None:
    views = [
        make_view("a", WorkerLoad(num_queued_prompt_tokens=500)),
        make_view("b", WorkerLoad(num_running=3)),
        make_view("c", state=WorkerState.DEAD),
    ]
    assert make_least_loaded(views).choose(request(10)).worker_ids == (B, A)


def test_requests_between_two_reports_spread_by_reservation() -> None:
    views = [make_view("a"), make_view("b")]
    placement = make_least_loaded(views)
    first = placement.choose(request(100)).worker_ids[0]
    assert placement.choose(request(100)).worker_ids[0] != first
    placement.updated(make_view(first))
    assert placement.choose(request(100)).worker_ids[0] == first


def test_equal_workers_take_turns() -> None:
    views = [make_view(name) for name in "abc"]
    placement = make_least_loaded(views)
    chosen = []
    for _ in range(6):
        chosen.append(placement.choose(request(0)).worker_ids[0])
        for worker in (A, B, C):
            placement.updated(make_view(worker))
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [A, B, C]


def test_a_decode_owner_comes_with_prefill_workers_and_a_mixed_one_prefills_itself() -> None:
    views = [
        make_view("prefill-0", WorkerLoad(num_queued_prompt_tokens=900)),
        make_view("prefill-1"),
        make_view("decode-0"),
        make_view("mixed-0", WorkerLoad(num_running=9)),
    ]
    route = make_least_loaded(views).choose(request(100))
    assert route.worker_ids == ("decode-0", "mixed-0")
    assert route.prefill_worker_ids == ("prefill-1", "prefill-0")
    assert "prefill-1" in route.reason


def test_without_a_prefill_worker_the_route_is_local() -> None:
    views = [make_view("prefill-0", state=WorkerState.DEAD), make_view("decode-0")]
    route = make_least_loaded(views).choose(request(100))
    assert (route.worker_ids, route.prefill_worker_ids) == (("decode-0",), ())
    assert "LOCAL" in route.reason
    assert choose_from_view(views, (), random.Random(0)).worker_ids == ("decode-0",)


def test_prefill_workers_take_turns_by_what_was_sent_to_them() -> None:
    views = [make_view("prefill-0"), make_view("prefill-1"), make_view("decode-0")]
    placement = make_least_loaded(views)
    first = [placement.choose(request(100)).prefill_worker_ids[0] for _ in range(4)]
    assert sorted(first[:2]) == sorted(first[2:]) == ["prefill-0", "prefill-1"]


def test_excluded_and_absent_workers_leave_an_empty_route_with_its_reason() -> None:
    route = make_least_loaded([make_view("a")]).choose(request(10, (A,)))
    assert (route.worker_ids, route.reason) == ((), "no worker is ready")
    assert choose_from_view([], (), random.Random(0)).worker_ids == ()


def test_the_fallback_prefers_the_less_loaded_of_two() -> None:
    views = [make_view("a", WorkerLoad(num_running=9)), make_view("b")]
    for seed in range(10):
        assert choose_from_view(views, (), random.Random(seed)).worker_ids == (B, A)
