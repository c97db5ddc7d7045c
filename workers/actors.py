"""The Ray actor of a worker: a thin shell around hosting, which it loads itself.

Whoever creates the actor needs this class, and no model code. Life cycle only: nothing of a request passes through Ray.
"""

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.logs import configure_logging
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role

SWITCH_INTERVAL_S = 0.0005


class WorkerActor:
    """One worker. Created detached and named by the launcher; stopped by ray.kill."""

    def __init__(
        self,
        worker_id: WorkerId,
        role: Role,
        config: DeploymentConfig,
        model_folder: str,
        served_name: str,
        channel: ChannelSettings,
        resolve_controller: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        configure_logging()
        # The engine thread holds the GIL between kernels; the loop must not wait the default 5 ms for it.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._arguments = (worker_id, role, config, model_folder, served_name, channel, resolve_controller)
        self._worker: object = None
        self._start = asyncio.get_running_loop().create_task(self._load_and_serve())

    async def _load_and_serve(self) -> None:
        hosting = await asyncio.to_thread(importlib.import_module, "pdserve.workers.hosting")
        self._worker = await hosting.host_worker(*self._arguments)

    async def wait_started(self) -> None:
        """Return when the worker serves; raises what loading raised."""
        await asyncio.shield(self._start)
