"""A rolling restart: every worker is replaced, one at a time, without fewer of its role than before. Pure.

begins ──▶ SURGING: one more of the role starts ──▶ DRAINING: the old one moves its requests, and stops ──▶ next
                      └─ not ready within `surge_timeout_s`: there is no room for it before the old one leaves
"""

import logging
from collections.abc import Sequence

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.control.membership import Membership, role_of

logger = logging.getLogger(__name__)


class Rollout:
    """Ticked by the controller until it has ended."""

    def __init__(
        self, membership: Membership, worker_ids: Sequence[WorkerId], clock: Clock, *, surge_timeout_s: float
    ) -> None:
        self._membership = membership
        self._left = list(worker_ids)
        self._num_workers = len(worker_ids)
        self._clock = clock
        self._surge_timeout_s = surge_timeout_s
        self._present: WorkerId | None = None
        self._surge_time: float | None = None

    def __str__(self) -> str:
        """Return how far it is, for status."""
        what = "the next one follows" if self._left else "done"
        if self._present is not None:
            what = f"{self._present} " + ("drains" if self._surge_time is None else "waits for its replacement")
        num_replaced = self._num_workers - len(self._left) - (self._present is not None)
        return f"rolling restart: {num_replaced} of {self._num_workers} replaced, {what}"

    @property
    def has_ended(self) -> bool:
        """True if every worker was replaced."""
        return self._present is None and not self._left

    def tick(self) -> None:
        """Go on as far as it goes now."""
        if self._present is not None and not self._membership.has(self._present):
            # Stopped, or dead by itself.
            self._end_surge(self._present)
            self._present = None
        if self._present is None:
            if not self._left:
                return
            self._present, self._surge_time = self._left.pop(0), self._clock.now()
            self._membership.set_surge(role_of(self._present), 1)
        elif self._surge_time is not None and self._may_drain(self._present, self._surge_time):
            self._end_surge(self._present)
            self._membership.drain(self._present)

    def _may_drain(self, worker_id: WorkerId, since_time: float) -> bool:
        if not self._membership.is_ready(worker_id):
            return False
        role = role_of(worker_id)
        if self._membership.num_ready(role) > self._membership.target(role):
            return True
        if self._clock.now() - since_time <= self._surge_timeout_s:
            return False
        logger.warning("worker_id=%s its replacement has no room, or does not start: it drains first", worker_id)
        return True

    def _end_surge(self, worker_id: WorkerId) -> None:
        self._surge_time = None
        self._membership.set_surge(role_of(worker_id), 0)
