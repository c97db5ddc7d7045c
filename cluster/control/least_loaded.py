"""Chooses the least loaded workers that are ready: an owner, and who prefills for it. Pure; the baseline.

A decode or mixed worker owns the request; the prompt of a decode worker's request is computed by a prefill worker, or
by itself if none is ready (LOCAL). Load is the prompt tokens a worker still has to compute plus what was sent to it
since its last report (reservations), then the sequences it runs and holds; ties go to the worker that was chosen
longest ago.
"""

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.route import Decision, Placeable, Route
from pdserve.cluster.base.worker_info import Role, WorkerState, WorkerView

DECODE_TOKEN_COST = 8
"""Prompt tokens that one running sequence counts for."""
MAX_CANDIDATES = 3


class LeastLoaded:
    """Keeps the reservations between two reports of a worker. See Placement."""

    def __init__(self) -> None:
        self._views: dict[WorkerId, WorkerView] = {}
        self._reserved: dict[WorkerId, int] = {}
        self._last_choice: dict[WorkerId, int] = {}
        self._num_choices = 0

    def updated(self, view: WorkerView) -> None:
        """A fresh report counts what was sent; forget the reservations."""
        self._views[view.info.worker_id] = view
        self._reserved.pop(view.info.worker_id, None)

    def removed(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._views.pop(worker_id, None)
        self._reserved.pop(worker_id, None)
        self._last_choice.pop(worker_id, None)

    def cache_changed(self, update: CacheUpdate) -> bool:
        """Caches do not count."""
        return True

    def decisions(self, client_id: str) -> tuple[Decision, ...]:
        """Nothing is compared, so nothing is noted."""
        return ()

    def choose(self, request: Placeable) -> Route:
        """Return up to three owners and three prefill workers, least loaded first; reserve the prompt on the first."""
        ready = [
            worker
            for worker in self._views.values()
            if worker.state is WorkerState.READY and worker.info.worker_id not in request.excluded
        ]
        owners = self._ranked([worker for worker in ready if worker.info.role.owns_requests])
        if not owners:
            return Route(worker_ids=(), reason="no worker is ready")
        prefills = self._ranked([worker for worker in ready if worker.info.role is Role.PREFILL])
        owner = owners[0]
        reason = f"least loaded of {len(owners)}: {owner.info.worker_id} cost {self._cost(owner)}"
        if owner.info.role is Role.DECODE and prefills:
            reason += f"; prefill, of {len(prefills)}: {prefills[0].info.worker_id} cost {self._cost(prefills[0])}"
            self._reserve(prefills[0], request.num_tokens)
            self._reserve(owner, 0)
        else:
            reason += "; prefill there" if owner.info.role is Role.MIXED else "; LOCAL: no prefill worker is ready"
            self._reserve(owner, request.num_tokens)
        return Route(
            worker_ids=tuple(worker.info.worker_id for worker in owners[:MAX_CANDIDATES]),
            prefill_worker_ids=tuple(worker.info.worker_id for worker in prefills[:MAX_CANDIDATES]),
            reason=reason,
        )

    def _reserve(self, worker: WorkerView, num_prompt_tokens: int) -> None:
        worker_id = worker.info.worker_id
        self._reserved[worker_id] = self._reserved.get(worker_id, 0) + num_prompt_tokens + DECODE_TOKEN_COST
        self._num_choices += 1
        self._last_choice[worker_id] = self._num_choices

    def _ranked(self, workers: list[WorkerView]) -> list[WorkerView]:
        return sorted(workers, key=self._rank)

    def _rank(self, worker: WorkerView) -> tuple[int, int]:
        return self._cost(worker), self._last_choice.get(worker.info.worker_id, 0)

    def _cost(self, worker: WorkerView) -> int:
        load = worker.load
        sequences = load.num_running + load.num_waiting + load.num_receiving
        reserved = self._reserved.get(worker.info.worker_id, 0)
        return load.num_queued_prompt_tokens + DECODE_TOKEN_COST * sequences + reserved
