"""The answer to "where does this request go"."""

from dataclasses import dataclass

from pdserve.cluster.base.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Workers to try, best first: the first that does not answer BUSY owns the request."""

    worker_ids: tuple[WorkerId, ...]
    reason: str
