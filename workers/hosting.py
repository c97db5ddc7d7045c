"""Makes a worker of a configuration: loads the engine off the loop, then runs the worker service on it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.ids import WorkerId, draw_incarnation
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role, WorkerInfo
from pdserve.workers.assembly import AssembledEngine, assemble_engine
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.worker import Worker, WorkerSettings


async def host_worker(
    worker_id: WorkerId,
    role: Role,
    config: DeploymentConfig,
    model_folder: str,
    served_name: str,
    channel: ChannelSettings,
    resolve_controller: Callable[[], Awaitable[Endpoint]],
) -> Worker:
    """Return a worker that serves, and registers with the controller.

    Raises CheckpointError or ConfigError if its model or its configuration cannot be served.
    """
    clock = SystemClock()
    assembled = await asyncio.to_thread(
        assemble_engine,
        Path(model_folder),
        config.engine_of(role),
        max_model_len=config.model.max_model_len,
        num_threads=config.threads_of(role),
        clock=clock,
        promised_share=config.transfer.promised_share,
    )
    copier = BlockCopier(assembled.store)
    await asyncio.to_thread(copier.warm_up)
    settings = WorkerSettings(
        host=config.ingress.host,
        channel=channel,
        transfer=config.transfer,
        copiers=(copier,),
        max_waiting=config.engine_of(role).max_waiting,
        clock=clock,
    )
    describe = partial(_describe, assembled, worker_id, role, config, served_name)
    worker = Worker(assembled.engine, settings, describe, resolve_controller)
    await worker.start()
    return worker


def _describe(
    assembled: AssembledEngine,
    worker_id: WorkerId,
    role: Role,
    config: DeploymentConfig,
    served_name: str,
    endpoint: Endpoint,
) -> WorkerInfo:
    model = assembled.model
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=draw_incarnation(),
        role=role,
        endpoint=endpoint,
        pid=os.getpid(),
        device=config.engine.device,
        model_name=served_name,
        model_digest=model.digest,
        numerics_digest=assembled.numerics.digest,
        numerics_class=assembled.numerics.numerics_class,
        numerics_note=assembled.numerics.note,
        vocab_size=model.spec.vocab_size,
        max_model_len=assembled.max_model_len,
        num_blocks=max(assembled.memory.num_blocks),
        block_size=config.engine_of(role).block_size,
        max_running=config.engine_of(role).max_running,
        memory_bytes=assembled.resident_bytes,
    )
