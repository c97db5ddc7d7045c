"""The real worker actor, on a wire that damages chunks and on transports that can be killed."""

from typing import Any

from pdserve.workers import hosting, worker
from pdserve.workers.actors import WorkerActor
from pdserve.workers.handoff import ranks
from support.fragile_transports import FragileTransports
from support.runners import DamagingCopier

DAMAGED_SHARE = 0.02


class FaultyWorkerActor(WorkerActor):
    """See WorkerActor."""

    def __init__(self, *arguments: Any) -> None:
        ranks.Transports = FragileTransports  # type: ignore[misc]
        hosting.make_copier = lambda store: DamagingCopier(store, share=DAMAGED_SHARE)  # type: ignore[misc,assignment]
        super().__init__(*arguments)

    @property
    def _served(self) -> worker.Worker:
        assert isinstance(self._worker, worker.Worker)
        return self._worker

    async def kill_transport(self, name: str) -> None:
        """See FragileTransports."""
        transports = self._served._ranks.local.transports  # type: ignore[union-attr]
        assert isinstance(transports, FragileTransports)
        transports.killed.add(name)

    async def state(self) -> tuple[bool, str]:
        """Return whether nothing is held (LEAK check), and the metrics."""
        served, load = self._served, self._served.load()
        is_clean = (
            served.num_live == 0
            and (load.num_running, load.num_waiting, load.num_queued_prompt_tokens) == (0, 0, 0)
            and served._engine.pool.is_all_free
            and served.has_idle_handoff
        )
        return is_clean, served.metrics_text()
