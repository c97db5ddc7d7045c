"""Least-loaded placement and the ingress's fallback."""

import random

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import WorkerLoad, WorkerState
from pdserve.cluster.control.placement import LeastLoaded
from pdserve.router.fallback import choose_from_view
from support.workers import make_view

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def test_the_least_loaded_ready_worker_comes_first() -> None:
    views = [
        make_view("a", WorkerLoad(num_queued_prompt_tokens=500)),
        make_view("b", WorkerLoad(num_running=3)),
        make_view("c", state=WorkerState.DEAD),
    ]
    assert LeastLoaded().choose(views, 10).worker_ids == (B, A)


def test_requests_between_two_reports_spread_by_reservation() -> None:
    placement = LeastLoaded()
    views = [make_view("a"), make_view("b")]
    first = placement.choose(views, 100).worker_ids[0]
    assert placement.choose(views, 100).worker_ids[0] != first
    placement.reported(first)
    assert placement.choose(views, 100).worker_ids[0] == first


def test_equal_workers_take_turns() -> None:
    placement = LeastLoaded()
    views = [make_view(name) for name in "abc"]
    chosen = []
    for _ in range(6):
        chosen.append(placement.choose(views, 0).worker_ids[0])
        for worker in (A, B, C):
            placement.reported(worker)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [A, B, C]


def test_a_decode_owner_comes_with_prefill_workers_and_a_mixed_one_prefills_itself() -> None:
    views = [
        make_view("prefill-0", WorkerLoad(num_queued_prompt_tokens=900)),
        make_view("prefill-1"),
        make_view("decode-0"),
        make_view("mixed-0", WorkerLoad(num_running=9)),
    ]
    route = LeastLoaded().choose(views, 100)
    assert route.worker_ids == ("decode-0", "mixed-0")
    assert route.prefill_worker_ids == ("prefill-1", "prefill-0")
    assert "prefill-1" in route.reason


def test_without_a_prefill_worker_the_route_is_local() -> None:
    views = [make_view("prefill-0", state=WorkerState.DEAD), make_view("decode-0")]
    route = LeastLoaded().choose(views, 100)
    assert (route.worker_ids, route.prefill_worker_ids) == (("decode-0",), ())
    assert "LOCAL" in route.reason
    assert choose_from_view(views, (), random.Random(0)).worker_ids == ("decode-0",)


def test_prefill_workers_take_turns_by_what_was_sent_to_them() -> None:
    placement = LeastLoaded()
    views = [make_view("prefill-0"), make_view("prefill-1"), make_view("decode-0")]
    first = [placement.choose(views, 100).prefill_worker_ids[0] for _ in range(4)]
    assert sorted(first[:2]) == sorted(first[2:]) == ["prefill-0", "prefill-1"]


def test_excluded_and_absent_workers_leave_an_empty_route_with_its_reason() -> None:
    route = LeastLoaded().choose([make_view("a")], 10, excluded=(A,))
    assert (route.worker_ids, route.reason) == ((), "no worker is ready")
    assert choose_from_view([], (), random.Random(0)).worker_ids == ()


def test_the_fallback_prefers_the_less_loaded_of_two() -> None:
    views = [make_view("a", WorkerLoad(num_running=9)), make_view("b")]
    for seed in range(10):
        assert choose_from_view(views, (), random.Random(seed)).worker_ids == (B, A)
