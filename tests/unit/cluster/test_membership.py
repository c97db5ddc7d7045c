"""The membership table under a manual clock."""

from dataclasses import replace

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.worker_info import Role, WorkerLoad, WorkerState
from pdserve.cluster.control.membership import (
    BENCH_S,
    MANY_FAILED_STARTS,
    Membership,
    MembershipSettings,
    RemoveWorker,
    StartWorker,
)
from support.workers import make_info

SETTINGS = MembershipSettings(targets={Role.MIXED: 1}, start_timeout_s=30.0, backoff_s=2.0)
BUSY = WorkerLoad(has_runnable_work=True, num_steps=3, predicted_step_s=0.1)


def make(target: int = 1) -> tuple[Membership, ManualClock]:
    clock = ManualClock()
    return Membership(replace(SETTINGS, targets={Role.MIXED: target}), clock), clock


def start_one(membership: Membership) -> WorkerId:
    (instruction,) = membership.tick()
    assert isinstance(instruction, StartWorker)
    return instruction.worker_id


def make_ready(membership: Membership) -> WorkerId:
    worker_id = start_one(membership)
    assert membership.registered(make_info(worker_id), WorkerLoad())
    return worker_id


def test_workers_are_started_up_to_the_target_with_distinct_names() -> None:
    membership, _ = make(target=3)
    started = membership.tick()
    assert len({instruction.worker_id for instruction in started}) == 3
    assert membership.tick() == []
    assert membership.view() == ()


def test_each_role_has_its_own_target_and_names() -> None:
    clock = ManualClock()
    membership = Membership(replace(SETTINGS, targets={Role.PREFILL: 1, Role.DECODE: 2}), clock)
    started = [(item.worker_id, item.role) for item in membership.tick() if isinstance(item, StartWorker)]
    assert started == [("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE), ("decode-1", Role.DECODE)]
    membership.failed(WorkerId("decode-0"), "broken")
    (again,) = [item for item in membership.tick() if isinstance(item, StartWorker)]
    assert (again.worker_id, again.role) == ("decode-2", Role.DECODE)


def test_deaths_of_one_role_do_not_delay_another() -> None:
    clock = ManualClock()
    membership = Membership(replace(SETTINGS, targets={Role.PREFILL: 1, Role.DECODE: 1}), clock)
    membership.tick()
    for number in range(4):  # a prefill worker that cannot load
        membership.failed_to_start(WorkerId(f"prefill-{number}"), "broken", is_permanent=False)
        clock.advance(70.0)
        assert membership.registered(make_info(WorkerId("decode-0")), WorkerLoad())
        membership.tick()
    membership.failed_to_start(WorkerId("prefill-4"), "broken", is_permanent=False)
    membership.failed(WorkerId("decode-0"), "gone")
    assert [item.worker_id for item in membership.tick() if isinstance(item, StartWorker)] == ["decode-1"]


def test_after_a_restart_a_role_is_known_when_all_that_were_found_are_back_or_gone() -> None:
    membership, clock = make()
    for name in ("prefill-0", "prefill-1", "decode-0"):
        membership.adopt(WorkerId(name))
    clock.advance(10.0)
    assert membership.is_settled, "routing does not wait for ever"
    membership.registered(make_info(WorkerId("prefill-0")), WorkerLoad())
    assert not membership.is_known(Role.PREFILL)
    membership.failed_to_start(WorkerId("prefill-1"), "its process is gone", is_permanent=False)
    assert membership.is_known(Role.PREFILL)
    assert not membership.is_known(Role.DECODE)


def test_a_registered_worker_is_ready() -> None:
    membership, _ = make()
    worker_id = make_ready(membership)
    (view,) = membership.view()
    assert (view.info.worker_id, view.state) == (worker_id, WorkerState.READY)


def test_an_unknown_worker_and_another_life_are_turned_away() -> None:
    membership, _ = make()
    worker_id = make_ready(membership)
    assert not membership.registered(make_info(WorkerId("stranger-9")), WorkerLoad())
    assert not membership.registered(make_info(worker_id, incarnation="other"), WorkerLoad())


def test_a_lost_channel_leaves_routing_at_once_and_may_come_back() -> None:
    membership, clock = make()
    worker_id = make_ready(membership)
    membership.lost(worker_id, make_info(worker_id).incarnation)
    assert membership.view()[0].state is WorkerState.DEAD
    clock.advance(0.5)
    assert membership.tick() == []
    assert membership.registered(make_info(worker_id), WorkerLoad())
    clock.advance(5.0)
    assert membership.tick() == []
    assert membership.view()[0].state is WorkerState.READY


def test_the_loss_of_an_earlier_life_changes_nothing() -> None:
    membership, _ = make()
    worker_id = make_ready(membership)
    membership.lost(worker_id, Incarnation("earlier"))
    assert membership.view()[0].state is WorkerState.READY


def test_a_worker_that_does_not_come_back_is_removed_and_replaced() -> None:
    membership, clock = make()
    worker_id = make_ready(membership)
    membership.lost(worker_id, make_info(worker_id).incarnation)
    clock.advance(1.5)
    removed, started = membership.tick()
    assert removed == RemoveWorker(worker_id=worker_id, cause="its channel closed and it did not come back")
    assert isinstance(started, StartWorker)
    assert started.worker_id != worker_id


def wait_for_start(membership: Membership, clock: ManualClock) -> tuple[WorkerId, float]:
    """Tick until a worker is started; return it and how long that took."""
    start_time = clock.now()
    while True:
        for instruction in membership.tick():
            if isinstance(instruction, StartWorker):
                return instruction.worker_id, clock.now() - start_time
        clock.advance(0.25)


def test_deaths_in_a_row_wait_longer_each_time() -> None:
    membership, clock = make()
    waits = []
    for _ in range(5):
        worker_id, wait_s = wait_for_start(membership, clock)
        waits.append(wait_s)
        assert membership.failed(worker_id, "boom") == [RemoveWorker(worker_id=worker_id, cause="boom")]
    assert waits == [0.0, 0.0, 4.0, 8.0, 16.0]
    assert len(membership.last_deaths) == 5


def test_a_minute_of_peace_forgives_earlier_deaths() -> None:
    membership, clock = make()
    for _ in range(4):
        membership.failed(wait_for_start(membership, clock)[0], "boom")
    worker_id, _ = wait_for_start(membership, clock)
    membership.registered(make_info(worker_id), WorkerLoad())
    for _ in range(61):
        clock.advance(1.0)
        membership.reported(worker_id, WorkerLoad())
        assert membership.tick() == []
    membership.failed(worker_id, "boom")
    assert wait_for_start(membership, clock)[1] == 0.0


def test_a_worker_that_never_registers_is_replaced() -> None:
    membership, clock = make()
    worker_id = start_one(membership)
    clock.advance(30.5)
    assert membership.tick()[0] == RemoveWorker(worker_id=worker_id, cause="not ready within 30 s")


def test_work_without_steps_is_a_stall_and_idleness_is_not() -> None:
    membership, clock = make()
    worker_id = make_ready(membership)
    for _ in range(20):
        clock.advance(1.0)
        membership.reported(worker_id, WorkerLoad(num_steps=3))
    assert membership.tick() == []
    for _ in range(9):
        clock.advance(1.0)
        membership.reported(worker_id, BUSY)
        assert membership.tick() == []
    clock.advance(2.0)
    membership.reported(worker_id, BUSY)
    (removed, _) = membership.tick()
    assert isinstance(removed, RemoveWorker)
    assert "stalled" in removed.cause


def test_slow_steps_are_given_five_times_their_prediction() -> None:
    membership, clock = make()
    worker_id = make_ready(membership)
    slow = replace(BUSY, predicted_step_s=4.0)
    for _ in range(19):
        membership.reported(worker_id, slow)
        clock.advance(1.0)
        assert membership.tick() == []


def test_a_new_controller_waits_for_the_workers_it_found() -> None:
    membership, clock = make()
    membership.adopt(WorkerId("mixed-4"))
    assert not membership.is_settled
    assert membership.tick() == []
    assert membership.registered(make_info(WorkerId("mixed-4")), WorkerLoad())
    assert membership.is_settled
    membership.failed(WorkerId("mixed-4"), "boom")
    (started,) = membership.tick()
    assert started == StartWorker(worker_id=WorkerId("mixed-5"), role=Role.MIXED)
    del clock


def test_a_new_controller_does_not_wait_for_ever() -> None:
    membership, clock = make()
    membership.adopt(WorkerId("mixed-0"))
    clock.advance(3.5)
    assert membership.is_settled


def test_a_failed_start_is_buried_at_once_and_only_while_starting() -> None:
    membership, _ = make()
    worker_id = start_one(membership)
    (removed,) = membership.failed_to_start(worker_id, "tensor x is missing", is_permanent=True)
    assert removed == RemoveWorker(worker_id=worker_id, cause="did not start: tensor x is missing")
    assert [death.is_permanent for death in membership.last_deaths] == [True]
    ready = make_ready(membership)
    assert membership.failed_to_start(ready, "its actor died later", is_permanent=False) == []
    assert membership.view()[0].state is WorkerState.READY


def drain_one(num_running: int = 1) -> tuple[Membership, ManualClock, WorkerId]:
    membership, clock = make()
    worker_id = make_ready(membership)
    membership.reported(worker_id, WorkerLoad(num_running=num_running))
    membership.drain(worker_id)
    return membership, clock, worker_id


def test_a_draining_worker_is_replaced_at_once_and_stopped_when_nobody_waits_for_it() -> None:
    membership, clock, worker_id = drain_one()
    assert [view.state for view in membership.view()] == [WorkerState.DRAINING]
    replacement = start_one(membership)
    assert membership.registered(make_info(replacement), WorkerLoad())
    clock.advance(5.0)
    membership.reported(worker_id, WorkerLoad(num_running=1))
    assert membership.tick() == []
    membership.reported(worker_id, WorkerLoad(num_sending=1))
    assert membership.tick() == []
    membership.reported(worker_id, WorkerLoad())
    assert membership.tick() == [RemoveWorker(worker_id=worker_id, cause="drained")]
    assert membership.last_deaths == (), "it did not die"
    assert membership.tick() == []
    assert [view.info.worker_id for view in membership.view()] == [replacement]


def test_what_was_on_its_way_to_a_draining_worker_may_still_come() -> None:
    membership, clock, worker_id = drain_one(num_running=0)
    start_one(membership)
    clock.advance(0.1)
    membership.reported(worker_id, WorkerLoad())
    assert membership.tick() == []
    clock.advance(0.8)
    membership.reported(worker_id, WorkerLoad(num_running=1))
    clock.advance(0.8)
    membership.reported(worker_id, WorkerLoad(num_running=1))
    assert membership.tick() == []


def test_a_drain_has_an_end() -> None:
    membership, clock, worker_id = drain_one()
    replacement = start_one(membership)
    assert membership.registered(make_info(replacement), WorkerLoad())
    for _ in range(61):
        clock.advance(10.0)
        for one in (worker_id, replacement):
            membership.reported(one, WorkerLoad(num_running=1))
    (removed,) = membership.tick()
    assert isinstance(removed, RemoveWorker)
    assert removed.worker_id == worker_id
    assert "600 s" in removed.cause


def test_only_a_worker_that_serves_can_drain_and_a_second_time_changes_nothing() -> None:
    membership, clock, worker_id = drain_one()
    starting = start_one(membership)
    for unknown in (starting, WorkerId("mixed-9")):
        with pytest.raises(ConfigError, match=unknown):
            membership.drain(unknown)
    clock.advance(2.0)
    membership.drain(worker_id)
    membership.reported(worker_id, WorkerLoad())
    assert membership.tick() == [RemoveWorker(worker_id=worker_id, cause="drained")]


def test_a_worker_that_dies_while_it_drains_is_buried() -> None:
    membership, clock, worker_id = drain_one()
    start_one(membership)
    membership.lost(worker_id, make_info(worker_id).incarnation)
    clock.advance(1.1)
    (removed,) = membership.tick()
    assert isinstance(removed, RemoveWorker)
    assert [death.worker_id for death in membership.last_deaths] == [worker_id]


def test_a_new_controller_lets_a_worker_go_on_draining() -> None:
    membership, clock = make()
    worker_id = WorkerId("mixed-3")
    membership.adopt(worker_id)
    assert membership.registered(make_info(worker_id), WorkerLoad(num_running=1, is_draining=True))
    assert [view.state for view in membership.view()] == [WorkerState.DRAINING]
    assert start_one(membership) == "mixed-4"
    clock.advance(1.1)
    membership.reported(worker_id, WorkerLoad(is_draining=True))
    assert membership.tick() == [RemoveWorker(worker_id=worker_id, cause="drained")]


def test_a_role_whose_workers_cannot_start_is_benched_and_shown() -> None:
    membership, clock = make()
    pauses = []
    for _ in range(MANY_FAILED_STARTS):
        worker_id = start_one(membership)
        membership.failed_to_start(worker_id, "broken", is_permanent=False)
        pauses += membership.pauses()
        clock.advance(pauses[-1].left_s + 0.01 if pauses else 0.0)
    # The first one is replaced at once.
    assert [pause.num_deaths for pause in pauses] == list(range(2, MANY_FAILED_STARTS + 1))
    assert [pause.is_benched for pause in pauses] == [False] * (MANY_FAILED_STARTS - 2) + [True]
    assert pauses[-1].left_s == BENCH_S
    assert str(pauses[-1]) == f"mixed: benched: {MANY_FAILED_STARTS} deaths in a row, the next start in {BENCH_S:.0f} s"
    assert membership.pauses() == ()
    # One that was ready in between ends the row.
    worker_id = make_ready(membership)
    membership.failed(worker_id, "boom")
    assert [pause.is_benched for pause in membership.pauses()] == [False]
