"""A rolling restart: every worker is replaced, one at a time. Pure.

    begins ──▶ SURGING: one more of the role starts ──▶ DRAINING: the old one moves its ──▶ REFILLING: until the role
       │                                                   requests, and stops                has all its workers
       └─ there is no room for one more, or it is not ready within `surge_timeout_s` ─▲             └─▶ next

With room a role never has fewer workers than before; without, one fewer.
"""

import logging
from collections.abc import Callable, Sequence
from enum import StrEnum

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import Role
from pdserve.cluster.control.membership import Membership, role_of

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """What is awaited; the text is for status."""

    SURGING = "waits for its replacement"
    DRAINING = "drains"
    REFILLING = "is replaced"


class Rollout:
    """Ticked by the controller until it has ended."""

    def __init__(
        self,
        membership: Membership,
        worker_ids: Sequence[WorkerId],
        clock: Clock,
        *,
        surge_timeout_s: float,
        has_room: Callable[[Role], bool],
    ) -> None:
        """`has_room` says whether one more worker of a role could be placed now."""
        self._membership = membership
        self._left = list(worker_ids)
        self._num_workers = len(worker_ids)
        self._clock = clock
        self._surge_timeout_s = surge_timeout_s
        self._has_room = has_room
        self._present: WorkerId | None = None
        self._phase = Phase.REFILLING
        self._surge_time = 0.0

    def __str__(self) -> str:
        """Return how far it is, for status."""
        num_replaced = self._num_workers - len(self._left) - (self._present is not None)
        what = "done" if self._present is None else f"{self._present} {self._phase}"
        return f"{num_replaced} of {self._num_workers} workers replaced, {what}"

    @property
    def has_ended(self) -> bool:
        """True if every worker was replaced, and the replacements are ready."""
        return self._present is None and not self._left

    def tick(self) -> None:
        """Go on as far as it goes now."""
        if self._present is None:
            if self._left:
                self._begin(self._left.pop(0))
            return
        role = role_of(self._present)
        if not self._membership.has(self._present):
            # Stopped, or dead by itself.
            self._membership.set_surge(role, 0)
            self._phase = Phase.REFILLING
            if self._membership.num_ready(role) >= self._membership.target(role):
                self._present = None
        elif self._phase is Phase.SURGING and self._may_drain(self._present, role):
            self._drain(self._present, role)

    def _begin(self, worker_id: WorkerId) -> None:
        role = role_of(worker_id)
        self._present, self._phase, self._surge_time = worker_id, Phase.SURGING, self._clock.now()
        if not self._membership.is_ready(worker_id):
            return
        if self._has_room(role):
            self._membership.set_surge(role, 1)
        else:
            logger.info("worker_id=%s there is no room for one more: it drains first", worker_id)
            self._drain(worker_id, role)

    def _may_drain(self, worker_id: WorkerId, role: Role) -> bool:
        if not self._membership.is_ready(worker_id):
            return False
        if self._membership.num_ready(role) > self._membership.target(role):
            return True
        if self._clock.now() - self._surge_time <= self._surge_timeout_s:
            return False
        logger.warning("worker_id=%s its replacement does not start: it drains first", worker_id)
        return True

    def _drain(self, worker_id: WorkerId, role: Role) -> None:
        self._membership.set_surge(role, 0)
        self._membership.drain(worker_id)
        self._phase = Phase.DRAINING
