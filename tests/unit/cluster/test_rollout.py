"""Rolling restarts under a manual clock: one worker at a time, never fewer than before while there is room."""

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import Role, WorkerLoad
from pdserve.cluster.control.membership import Membership, MembershipSettings, RemoveWorker, StartWorker
from pdserve.cluster.control.rollout import Rollout
from support.workers import make_info

TICK_S = 0.1
START_S, DRAIN_S = 2.0, 3.0


class World:
    """Workers start and drain in fixed times; `room` is the number that fits at once."""

    def __init__(self, targets: dict[Role, int], room: int, surge_timeout_s: float = 20.0) -> None:
        self.clock = ManualClock()
        settings = MembershipSettings(targets=targets, start_timeout_s=300.0, backoff_s=1.0)
        self.membership = Membership(settings, self.clock)
        self.room = room
        self.present: dict[WorkerId, float] = {}
        self.pending: list[WorkerId] = []
        self.drained: dict[WorkerId, float] = {}
        self.least_ready = dict(targets)
        self.most_present = 0
        self.dead: set[WorkerId] = set()
        self.run(5.0)
        ready = [view.info.worker_id for view in self.membership.view()]
        self.first = set(ready)
        self.rollout = Rollout(
            self.membership, ready, self.clock, surge_timeout_s=surge_timeout_s, has_room=self.has_room
        )
        self.is_rolling = True

    is_rolling = False
    says_room = False
    """Though there is none."""

    def has_room(self, role: Role) -> bool:
        return self.says_room or len(self.present) < self.room

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def tick(self) -> None:
        self.clock.advance(TICK_S)
        if self.is_rolling:
            self.rollout.tick()
        for instruction in self.membership.tick():
            if isinstance(instruction, StartWorker):
                self.pending.append(instruction.worker_id)
            elif isinstance(instruction, RemoveWorker):
                self.present.pop(instruction.worker_id, None)
        while self.pending and len(self.present) < self.room:
            self.present[self.pending.pop(0)] = self.clock.now()
        self.most_present = max(self.most_present, len(self.present))
        for worker_id, start_time in self.present.items():
            if self.clock.now() - start_time < START_S:
                continue
            if not self.membership.is_ready(worker_id) and worker_id not in self.drained:
                if self.membership.has(worker_id) and worker_id not in self.states():
                    self.membership.registered(make_info(worker_id), WorkerLoad())
                else:
                    self.drained[worker_id] = self.clock.now()
            is_done = worker_id in self.drained and self.clock.now() - self.drained[worker_id] > DRAIN_S
            self.membership.reported(worker_id, WorkerLoad(num_running=0 if is_done else 1, num_steps=self.num_ticks()))
        if self.is_rolling:
            for role in self.least_ready:
                self.least_ready[role] = min(self.least_ready[role], self.membership.num_ready(role))

    def num_ticks(self) -> int:
        return round(self.clock.now() / TICK_S)

    def states(self) -> set[WorkerId]:
        return {view.info.worker_id for view in self.membership.view()}


def test_every_worker_is_replaced_and_the_pools_never_shrink_where_there_is_room() -> None:
    world = World({Role.PREFILL: 2, Role.DECODE: 2}, room=5)
    world.run(60.0)
    assert world.rollout.has_ended
    assert not world.states() & world.first
    assert len(world.states()) == 4
    assert world.least_ready == {Role.PREFILL: 2, Role.DECODE: 2}
    assert world.most_present == 5, "one more at a time"
    assert world.membership.last_deaths == ()


@pytest.mark.parametrize("says_room", [False, True])
def test_without_room_the_old_one_leaves_first_one_at_a_time(*, says_room: bool) -> None:
    world = World({Role.DECODE: 3}, room=3, surge_timeout_s=4.0)
    world.says_room = says_room
    seconds = 0.0
    while not world.rollout.has_ended and seconds < 60.0:
        world.run(TICK_S)
        seconds += TICK_S
    assert world.membership.num_ready(Role.DECODE) == 3, "it ends when the last replacement is ready"
    # Nothing waits for a surge that cannot be.
    assert (seconds > 3 * 4.0 + 3 * (START_S + DRAIN_S)) == says_room
    assert not world.states() & world.first
    assert world.least_ready == {Role.DECODE: 2}
    assert len(world.states()) == 3


def test_a_worker_that_dies_meanwhile_needs_no_drain() -> None:
    world = World({Role.DECODE: 2}, room=3)
    world.run(1.0)
    assert "waits for its replacement" in str(world.rollout)
    present = sorted(world.first)[0]
    world.membership.failed(present, "it died")
    world.present.pop(present)
    world.run(40.0)
    assert world.rollout.has_ended
    assert not world.states() & world.first
    assert len(world.states()) == 2
    assert str(world.rollout) == "2 of 2 workers replaced, done"
