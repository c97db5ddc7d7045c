"""Routing without the controller: power of two choices on the last view. Pure but for the injected random source."""

import random
from collections.abc import Sequence

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.worker_info import WorkerState, WorkerView


def choose_from_view(workers: Sequence[WorkerView], excluded: Sequence[WorkerId], source: random.Random) -> Route:
    """Return the less loaded of two random ready workers, then the other (Mitzenmacher 2001)."""
    ready = [
        worker for worker in workers if worker.state is WorkerState.READY and worker.info.worker_id not in excluded
    ]
    if not ready:
        return Route(worker_ids=(), reason="no worker is ready")
    pair = source.sample(ready, min(2, len(ready)))
    pair.sort(key=lambda worker: worker.load.num_queued_prompt_tokens + worker.load.num_running)
    return Route(worker_ids=tuple(worker.info.worker_id for worker in pair), reason="two choices on the last view")
