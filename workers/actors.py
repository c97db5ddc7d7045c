"""The Ray actors of a worker's ranks: thin shells around hosting, which they load themselves.

Whoever creates an actor needs these classes, and no model code. Life cycle only: nothing of a request passes through
Ray. A rank that ends, ends its process; the controller, which waits for each of them, learns why.
"""

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable

from pdserve.cluster.base.errors import PdserveError, RankLostError
from pdserve.cluster.base.logs import configure_logging
from pdserve.cluster.base.worker_info import Endpoint
from pdserve.workers.plan import WorkerPlan

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
LAST_WORDS_S = 0.5
"""For the answers to those who wait for the end of a rank."""


def _prepare_process() -> None:
    configure_logging()
    # The engine thread holds the GIL between kernels; the loop must not wait the default 5 ms for it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _end_process(cause: str) -> None:
    """End at once, whatever threads do: what a gang was computing cannot be gone on with."""
    logger.error("this process ends: %s", cause)
    logging.shutdown()
    os._exit(1)


class WorkerActor:
    """One worker, or rank 0 of it. Created detached and named by the launcher; stopped by ray.kill."""

    def __init__(
        self, plan: WorkerPlan, own_host: Callable[[], str], resolve_controller: Callable[[], Awaitable[Endpoint]]
    ) -> None:
        """`own_host` returns where processes of this node listen."""
        _prepare_process()
        self._plan = plan
        self._host = own_host()
        self._resolve_controller = resolve_controller
        self._worker: object = None
        loop = asyncio.get_running_loop()
        self._gang: asyncio.Future[Endpoint] = loop.create_future()
        self._start = loop.create_task(self._load_and_serve())

    async def _load_and_serve(self) -> None:
        hosting = await asyncio.to_thread(importlib.import_module, "pdserve.workers.hosting")
        self._worker = await hosting.host_worker(
            self._plan, self._host, self._resolve_controller, self._gang.set_result, _end_process
        )

    async def wait_started(self) -> None:
        """Return when the worker serves; raises what loading raised."""
        await asyncio.shield(self._start)

    async def gang_endpoint(self) -> Endpoint:
        """Return where the other ranks join."""
        return await asyncio.shield(self._gang)


class RankActor:
    """A rank other than 0. Created and stopped with its worker; ends itself when rank 0 is gone."""

    def __init__(
        self,
        plan: WorkerPlan,
        own_host: Callable[[], str],
        rank: int,
        resolve_leader: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        """See WorkerActor."""
        _prepare_process()
        self._plan = plan
        self._host = own_host()
        self._rank = rank
        self._resolve_leader = resolve_leader
        self._end = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> PdserveError:
        why: PdserveError = RankLostError("it failed to start or to stop")
        try:
            hosting = await asyncio.to_thread(importlib.import_module, "pdserve.workers.hosting")
            why = await hosting.follow(self._plan, self._host, self._rank, self._resolve_leader)
        finally:
            # Whatever happened: a rank without a gang is of no use.
            asyncio.get_running_loop().call_later(LAST_WORDS_S, _end_process, str(why))
        return why

    async def wait_ended(self) -> None:
        """Wait for the end of the rank, which it always raises: RankLostError, or ConfigError if it cannot be."""
        why = await asyncio.shield(self._end)
        raise type(why)(f"rank {self._rank}: {why}")
