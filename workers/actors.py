"""The Ray actor of a worker: loads the engine off the loop, then runs the worker service on the actor's loop.

Thin on purpose. Life cycle only: nothing of a request passes through Ray.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import DeploymentConfig, EngineConfig
from pdserve.cluster.base.ids import WorkerId, draw_incarnation
from pdserve.cluster.base.logs import configure_logging
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role, WorkerInfo
from pdserve.workers.assembly import AssembledEngine, assemble_engine
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.worker import Worker, WorkerSettings

logger = logging.getLogger(__name__)

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
        host: str,
        channel: ChannelSettings,
        resolve_controller: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        configure_logging()
        # The engine thread holds the GIL between kernels; the loop must not wait the default 5 ms for it.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._worker_id = worker_id
        self._config = config
        self._served_name = served_name
        self._role = role
        self._host = host
        self._channel = channel
        self._resolve_controller = resolve_controller
        self._worker: Worker | None = None
        self._start = asyncio.get_running_loop().create_task(self._load_and_serve(Path(model_folder)))

    async def _load_and_serve(self, folder: Path) -> None:
        config, clock = self._config, SystemClock()
        assembled = await asyncio.to_thread(
            assemble_engine,
            folder,
            engine_config(config, self._role),
            max_model_len=config.model.max_model_len,
            num_threads=config.engine_threads,
            clock=clock,
            promised_share=config.transfer.promised_share,
        )
        copier = BlockCopier(assembled.store)
        await asyncio.to_thread(copier.warm_up)
        settings = WorkerSettings(
            host=self._host,
            channel=self._channel,
            transfer=config.transfer,
            copier=copier,
            max_waiting=config.engine.max_waiting,
            clock=clock,
        )
        describe = partial(self._describe, assembled)
        self._worker = Worker(assembled.engine, settings, describe, self._resolve_controller)
        await self._worker.start()

    def _describe(self, assembled: AssembledEngine, endpoint: Endpoint) -> WorkerInfo:
        config, model = self._config.engine, assembled.model
        return WorkerInfo(
            worker_id=self._worker_id,
            incarnation=draw_incarnation(),
            role=self._role,
            endpoint=endpoint,
            pid=os.getpid(),
            device=config.device,
            model_name=self._served_name,
            model_digest=model.digest,
            numerics_digest=assembled.numerics.digest,
            numerics_class=assembled.numerics.numerics_class,
            numerics_note=assembled.numerics.note,
            vocab_size=model.spec.vocab_size,
            max_model_len=assembled.max_model_len,
            num_blocks=assembled.memory.num_blocks,
            block_size=config.block_size,
            max_running=config.max_running,
            memory_bytes=assembled.resident_bytes,
        )

    async def wait_started(self) -> None:
        """Return when the worker serves; raises what loading raised."""
        await asyncio.shield(self._start)


def engine_config(config: DeploymentConfig, role: Role) -> EngineConfig:
    """Return the engine section for a role: a decode worker computes prompts in smaller steps."""
    if role is not Role.DECODE:
        return config.engine
    budget = min(config.engine.max_batch_tokens, config.workers.decode_batch_tokens)
    return config.engine.model_copy(update={"max_batch_tokens": budget})
