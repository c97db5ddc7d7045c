"""Which workers exist and in which state: a pure table under an injected clock.

    STARTING ── registered ──▶ READY ◀── registered again (its channel broke, or the controller is new)
        │                        │ └─ drain ─▶ DRAINING ── idle, or `drain_timeout_s` ──▶ STOPPED
        └─ start timeout ──┐     │                 │
                           ▼     ▼                 │
                          DEAD ◀─── channel lost and not back within `lost_grace_s`, failed (its engine threw),
                                    or stalled (work, but no step for too long)

Events in, instructions out. A dead worker is removed and, after a back-off that doubles with each death in a row,
replaced; a role whose workers keep failing to start is benched for minutes. One that drains does not count any more:
its replacement starts at once. The shell (controller) executes instructions and calls `tick` regularly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.worker_info import (
    Role,
    StartPause,
    WorkerDeath,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    WorkerView,
)

MAX_BACKOFF_S = 60.0
MANY_FAILED_STARTS = 6
"""After so many in a row, none of them ready in between, the role is benched: another start hardly helps."""
BENCH_S = 300.0
STALL_STEPS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Create this worker."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveWorker:
    """Kill this worker and free what it holds."""

    worker_id: WorkerId
    cause: str


Instruction = StartWorker | RemoveWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """Targets and deadlines."""

    targets: Mapping[Role, int]
    start_timeout_s: float
    backoff_s: float
    lost_grace_s: float = 1.0
    adopt_grace_s: float = 3.0
    stall_s: float = 10.0
    drain_settle_s: float = 1.0
    """Before a draining worker may be taken for idle: requests that were on their way have arrived."""
    drain_timeout_s: float = 600.0


@dataclass(slots=True)
class _Member:
    state: WorkerState
    since_time: float
    info: WorkerInfo | None = None
    load: WorkerLoad = field(default_factory=WorkerLoad)
    lost_time: float | None = None
    step_time: float = 0.0
    drain_time: float | None = None
    """Since when it drains."""
    is_idle: bool = False
    """By a report that came `drain_settle_s` after that."""


class Membership:
    """The table."""

    def __init__(self, settings: MembershipSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._members: dict[WorkerId, _Member] = {}
        self._adopted: set[WorkerId] = set()
        self._found: set[WorkerId] = set()
        self._num_started: dict[Role, int] = {}
        self._deaths_in_row: dict[Role, int] = {}
        self._next_start_time: dict[Role, float] = {}
        self._last_deaths: list[WorkerDeath] = []
        self._failed_starts: dict[Role, int] = {}
        self._surges: dict[Role, int] = {}

    @property
    def is_settled(self) -> bool:
        """False while workers of an earlier controller may still be about to register again."""
        self._adopted = {worker_id for worker_id in self._adopted if self._is_awaited(worker_id)}
        return not self._adopted

    def is_known(self, role: Role) -> bool:
        """False while an adopted worker of the role may still live, but has not registered again."""
        return not any(
            role_of(worker_id) is role and self._members[worker_id].info is None
            for worker_id in self._found
            if worker_id in self._members
        )

    def _is_awaited(self, worker_id: WorkerId) -> bool:
        member = self._members.get(worker_id)
        if member is None or member.info is not None:
            return False
        return self._clock.now() - member.since_time < self._settings.adopt_grace_s

    def adopt(self, worker_id: WorkerId) -> None:
        """A worker of an earlier controller was found by name; it will register by itself."""
        self._adopted.add(worker_id)
        self._found.add(worker_id)
        self._members[worker_id] = _Member(WorkerState.STARTING, self._clock.now())
        role = role_of(worker_id)
        self._num_started[role] = max(self._num_started.get(role, 0), _number(worker_id) + 1)

    def registered(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        """A worker is ready, or back; False if it was given up and must not serve."""
        now = self._clock.now()
        member = self._members.get(info.worker_id)
        if member is None:
            return False
        if member.info is not None and member.info.incarnation != info.incarnation:
            return False
        if member.state is WorkerState.STARTING:
            member.since_time = now
            self._failed_starts.pop(role_of(info.worker_id), None)
        if load.is_draining and member.drain_time is None:
            # An earlier controller has told it to.
            member.drain_time = now
        member.state = WorkerState.READY if member.drain_time is None else WorkerState.DRAINING
        member.info = info
        member.load = load
        member.lost_time = None
        member.step_time = now
        return True

    def reported(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        """A load report arrived."""
        member = self._members.get(worker_id)
        if member is None or member.state is WorkerState.STARTING:
            return
        if member.drain_time is not None:
            has_settled = self._clock.now() - member.drain_time >= self._settings.drain_settle_s
            member.is_idle = has_settled and load.is_idle
        if load.num_steps != member.load.num_steps or not load.has_runnable_work:
            member.step_time = self._clock.now()
        member.load = load

    def drain(self, worker_id: WorkerId) -> None:
        """Stop a worker as soon as its requests have ended or moved. Raises ConfigError if it is not ready."""
        member = self._members.get(worker_id)
        if member is None or member.state is WorkerState.STARTING:
            ready = ", ".join(sorted(name for name in self._members if self.is_ready(name))) or "none"
            raise ConfigError(f"{worker_id} is no worker that is ready; ready are {ready}")
        if member.drain_time is None:
            member.drain_time = self._clock.now()
            member.state = WorkerState.DRAINING

    def lost(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """The channel to that life of the worker ended; it leaves routing at once and may come back."""
        member = self._members.get(worker_id)
        if member is not None and member.info is not None and member.info.incarnation == incarnation:
            member.lost_time = self._clock.now()

    def failed(self, worker_id: WorkerId, cause: str) -> list[Instruction]:
        """The worker cannot serve any more."""
        return self._bury(worker_id, cause)

    def failed_to_start(self, worker_id: WorkerId, cause: str, *, is_permanent: bool) -> list[Instruction]:
        """The worker's process ended, or its loading raised, before it registered.

        It is tried again, after a back-off, also if the cause is permanent: the model's files may be repaired.
        """
        member = self._members.get(worker_id)
        if member is None or member.state is not WorkerState.STARTING:
            return []
        return self._bury(worker_id, f"did not start: {cause}", is_permanent=is_permanent)

    def tick(self) -> list[Instruction]:
        """Apply deadlines and fill up to the target."""
        now = self._clock.now()
        instructions: list[Instruction] = []
        for worker_id in list(self._members):
            cause = self._overdue(self._members[worker_id], now)
            if cause is not None:
                instructions += self._bury(worker_id, cause)
            elif (end := self._end_of_drain(self._members[worker_id], now)) is not None:
                del self._members[worker_id]
                instructions.append(RemoveWorker(worker_id=worker_id, cause=end))
        self._forgive(now)
        for role in self._settings.targets:
            wanted = self.target(role) + self._surges.get(role, 0)
            while self._count(role) < wanted and now >= self._next_start_time.get(role, 0.0):
                instructions.append(self._start(role, now))
        return instructions

    def has(self, worker_id: WorkerId) -> bool:
        """True if the worker starts, serves or drains."""
        return worker_id in self._members

    def is_ready(self, worker_id: WorkerId) -> bool:
        """True if the worker takes requests."""
        member = self._members.get(worker_id)
        return member is not None and member.state is WorkerState.READY and member.lost_time is None

    def num_ready(self, role: Role) -> int:
        """Return the workers of a role that take requests."""
        return sum(role_of(worker_id) is role and self.is_ready(worker_id) for worker_id in self._members)

    def target(self, role: Role) -> int:
        """Return how many workers of a role there should be."""
        return self._settings.targets.get(role, 0)

    def set_surge(self, role: Role, count: int) -> None:
        """Start so many beyond the target, while others are about to leave; one too many stays until it does."""
        self._surges[role] = count

    def _count(self, role: Role) -> int:
        return sum(
            role_of(worker_id) is role and member.drain_time is None for worker_id, member in self._members.items()
        )

    def _start(self, role: Role, now: float) -> StartWorker:
        number = self._num_started.get(role, 0)
        self._num_started[role] = number + 1
        worker_id = WorkerId(f"{role}-{number}")
        self._members[worker_id] = _Member(WorkerState.STARTING, now)
        return StartWorker(worker_id=worker_id, role=role)

    def view(self) -> tuple[WorkerView, ...]:
        """Return every worker that has registered and not died."""
        views = (self.view_of(worker_id) for worker_id in self._members)
        return tuple(view for view in views if view is not None)

    def view_of(self, worker_id: WorkerId) -> WorkerView | None:
        """Return one worker; None if it has not registered, or died."""
        member = self._members.get(worker_id)
        if member is None or member.info is None:
            return None
        return WorkerView(info=member.info, state=self._visible_state(member), load=member.load)

    def starting(self) -> list[WorkerId]:
        """Return the workers that have not registered yet."""
        return [worker_id for worker_id, member in self._members.items() if member.info is None]

    @property
    def last_deaths(self) -> tuple[WorkerDeath, ...]:
        """The latest deaths, newest last."""
        return tuple(self._last_deaths)

    def pauses(self) -> tuple[StartPause, ...]:
        """Return the roles whose next start waits because of deaths in a row."""
        now = self._clock.now()
        return tuple(
            StartPause(
                role=role,
                num_deaths=self._deaths_in_row.get(role, 0),
                left_s=start_time - now,
                is_benched=self._is_benched(role),
            )
            for role, start_time in self._next_start_time.items()
            if start_time > now
        )

    def _is_benched(self, role: Role) -> bool:
        return self._failed_starts.get(role, 0) >= MANY_FAILED_STARTS

    def _visible_state(self, member: _Member) -> WorkerState:
        return member.state if member.lost_time is None else WorkerState.DEAD

    def _overdue(self, member: _Member, now: float) -> str | None:
        settings = self._settings
        if member.state is WorkerState.STARTING and now - member.since_time > settings.start_timeout_s:
            return f"not ready within {settings.start_timeout_s:g} s"
        if member.lost_time is not None and now - member.lost_time > settings.lost_grace_s:
            return "its channel closed and it did not come back"
        if member.state is not WorkerState.STARTING and member.lost_time is None:
            limit_s = max(settings.stall_s, STALL_STEPS * member.load.predicted_step_s)
            if now - member.step_time > limit_s:
                return f"stalled: work to do, but no step for {now - member.step_time:.1f} s"
        return None

    def _end_of_drain(self, member: _Member, now: float) -> str | None:
        """Return why a draining worker is stopped now, if it is."""
        if member.drain_time is None:
            return None
        if member.is_idle:
            return "drained"
        if now - member.drain_time > self._settings.drain_timeout_s:
            return f"drained for {self._settings.drain_timeout_s:g} s; what is left is replayed"
        return None

    def _bury(self, worker_id: WorkerId, cause: str, *, is_permanent: bool = False) -> list[Instruction]:
        member = self._members.pop(worker_id, None)
        if member is None:
            return []
        was_ready = member.state is not WorkerState.STARTING
        death = WorkerDeath(worker_id=worker_id, cause=cause, is_permanent=is_permanent)
        self._last_deaths = [*self._last_deaths[-9:], death]
        role = role_of(worker_id)
        deaths = self._deaths_in_row.get(role, 0)
        backoff_s = min(self._settings.backoff_s * 2**deaths, MAX_BACKOFF_S)
        if not was_ready:
            self._failed_starts[role] = self._failed_starts.get(role, 0) + 1
        if self._is_benched(role):
            backoff_s = BENCH_S
        # The first death is replaced at once; a row of them waits longer each time. Each role waits by itself.
        self._next_start_time[role] = self._clock.now() + (backoff_s if deaths else 0.0)
        self._deaths_in_row[role] = deaths + 1
        return [RemoveWorker(worker_id=worker_id, cause=cause)]

    def _forgive(self, now: float) -> None:
        for role in self._settings.targets:
            ready = [
                member
                for worker_id, member in self._members.items()
                if role_of(worker_id) is role and member.state is WorkerState.READY
            ]
            if ready and all(now - member.since_time > MAX_BACKOFF_S for member in ready):
                self._deaths_in_row.pop(role, None)


def role_of(worker_id: WorkerId) -> Role:
    """Return the role that a worker was started in: its id begins with it."""
    return Role(worker_id.rpartition("-")[0])


def _number(worker_id: WorkerId) -> int:
    number = worker_id.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
