"""The answer to "where does this request go"."""

from dataclasses import dataclass

from pdserve.cluster.base.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Workers to try, best first: the first that does not answer BUSY owns the request.

    `prefill_worker_ids` compute its prompt if the owner is a decode worker; none of them alive: the owner does (LOCAL).
    """

    worker_ids: tuple[WorkerId, ...]
    prefill_worker_ids: tuple[WorkerId, ...] = ()
    reason: str
