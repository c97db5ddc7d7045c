"""Routing without the controller: power of two choices on the last view. Pure but for the injected random source."""

import random
from collections.abc import Sequence

from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.route import Route
from pdserve.cluster.base.worker_info import Role, WorkerState, WorkerView


def choose_from_view(workers: Sequence[WorkerView], excluded: Sequence[WorkerId], source: random.Random) -> Route:
    """Return the less loaded of two random owners, then the other (Mitzenmacher 2001); prefill workers likewise."""
    ready = [
        worker for worker in workers if worker.state is WorkerState.READY and worker.info.worker_id not in excluded
    ]
    owners = _pair([worker for worker in ready if worker.info.role.owns_requests], source)
    if not owners:
        return Route(worker_ids=(), reason="no worker is ready")
    prefills = _pair([worker for worker in ready if worker.info.role is Role.PREFILL], source)
    return Route(worker_ids=owners, prefill_worker_ids=prefills, reason="two choices on the last view")


def _pair(workers: Sequence[WorkerView], source: random.Random) -> tuple[WorkerId, ...]:
    pair = source.sample(workers, min(2, len(workers)))
    pair.sort(key=lambda worker: worker.load.num_queued_prompt_tokens + worker.load.num_running)
    return tuple(worker.info.worker_id for worker in pair)
