"""Chooses the worker of a request: the least loaded one that is ready. Pure.

Load is the prompt tokens a worker still has to compute plus what was sent to it since its last report (reservations),
then the sequences it runs and holds; ties go to the worker that was chosen longest ago.
"""

from collections.abc import Sequence

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.worker_info import WorkerLoad, WorkerState, WorkerView

DECODE_TOKEN_COST = 8
"""Prompt tokens that one running sequence counts for."""
MAX_CANDIDATES = 3


class LeastLoaded:
    """Keeps the reservations between two reports of a worker."""

    def __init__(self) -> None:
        self._reserved: dict[WorkerId, int] = {}
        self._last_choice: dict[WorkerId, int] = {}
        self._num_choices = 0

    def reported(self, worker_id: WorkerId) -> None:
        """A fresh report counts what was sent; forget the reservations."""
        self._reserved.pop(worker_id, None)

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        self._reserved.pop(worker_id, None)
        self._last_choice.pop(worker_id, None)

    def choose(self, workers: Sequence[WorkerView], num_prompt_tokens: int, excluded: Sequence[WorkerId] = ()) -> Route:
        """Return up to three ready workers, least loaded first, and reserve the prompt on the first."""
        ready = [
            worker for worker in workers if worker.state is WorkerState.READY and worker.info.worker_id not in excluded
        ]
        if not ready:
            return Route(worker_ids=(), reason="no worker is ready")
        ranked = sorted(ready, key=self._rank)
        chosen = ranked[0]
        worker_id = chosen.info.worker_id
        reason = f"least loaded of {len(ready)}: cost {self._cost(worker_id, chosen.load)}"
        self._reserved[worker_id] = self._reserved.get(worker_id, 0) + num_prompt_tokens + DECODE_TOKEN_COST
        self._num_choices += 1
        self._last_choice[worker_id] = self._num_choices
        return Route(worker_ids=tuple(worker.info.worker_id for worker in ranked[:MAX_CANDIDATES]), reason=reason)

    def _rank(self, worker: WorkerView) -> tuple[int, int]:
        worker_id = worker.info.worker_id
        return self._cost(worker_id, worker.load), self._last_choice.get(worker_id, 0)

    def _cost(self, worker_id: WorkerId, load: WorkerLoad) -> int:
        sequences = load.num_running + load.num_waiting
        return load.num_queued_prompt_tokens + DECODE_TOKEN_COST * sequences + self._reserved.get(worker_id, 0)
