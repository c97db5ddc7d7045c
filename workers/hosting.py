"""Makes a worker, or one of its other ranks, of a plan: loads off the loop, then runs the service on it."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import NumericsKind
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.errors import PdserveError
from pdserve.cluster.base.ids import draw_incarnation
from pdserve.cluster.base.worker_info import Endpoint, WorkerInfo
from pdserve.workers.assembly import AssembledEngine, LoadedRank, assemble_loaded, load_rank
from pdserve.workers.gang.follower import Follower, FollowerSettings
from pdserve.workers.gang.leader import GangLeader
from pdserve.workers.gang.process_ranks import ProcessRank
from pdserve.workers.kv.copy import make_copier
from pdserve.workers.model.hub import download
from pdserve.workers.model.parallel import SOLO, RankGroup
from pdserve.workers.model.source import prepare_model
from pdserve.workers.plan import WorkerPlan
from pdserve.workers.worker import Worker, WorkerSettings

logger = logging.getLogger(__name__)

ResolveEndpoint = Callable[[], Awaitable[Endpoint]]
EndProcess = Callable[[str], None]


async def host_worker(
    plan: WorkerPlan,
    host: str,
    resolve_controller: ResolveEndpoint,
    publish_gang: Callable[[Endpoint], None],
    end_process: EndProcess,
) -> Worker:
    """Return a worker that serves at `host`, and registers with the controller.

    With several ranks this is rank 0: `publish_gang` learns where the others find it, and `end_process` ends the
    process, with a cause, when one of them is lost. Raises CheckpointError or ConfigError if its model or its
    configuration cannot be served, RankLostError if a rank is lost before.
    """
    if plan.engine.tensor_parallel == 1:
        loaded = await asyncio.to_thread(_load, plan, SOLO)
        return await _serve(plan, host, loaded, None, (), resolve_controller, end_process)
    worker: Worker | None = None

    def lost(cause: str) -> None:
        if worker is None:
            end_process(cause)
        else:
            worker.end(cause)

    leader = GangLeader(plan.engine.tensor_parallel, host, plan.channel, SystemClock(), lost)
    publish_gang(await leader.listen())
    timeout_s = plan.config.workers.start_timeout_s
    try:
        store, key = await leader.form(timeout_s)
        load = partial(_meet_and_load, plan, store, 0, plan.engine.tensor_parallel, key=key, host=host)
        loaded = await leader.unless_failed(asyncio.to_thread(load))
        notes = await leader.wait_ready(timeout_s)
        worker = await _serve(plan, host, loaded, leader, notes, resolve_controller, end_process)
    except BaseException:
        await leader.stop()
        raise
    return worker


async def follow(plan: WorkerPlan, host: str, rank: int, resolve_leader: ResolveEndpoint) -> PdserveError:
    """Be a rank other than 0, at `host`, until something ends it; return why."""

    def load(store: Any, key: str, own_address: str, num_ranks: int) -> LoadedRank:
        return _meet_and_load(plan, store, rank, num_ranks, key=key, host=own_address)

    settings = FollowerSettings(
        rank=rank,
        host=host,
        channel=plan.channel,
        transfer=plan.config.transfer,
        clock=SystemClock(),
        engine=plan.engine,
        num_threads=plan.num_threads,
        join_timeout_s=plan.config.workers.start_timeout_s,
    )
    return await Follower(settings, load, resolve_leader).run()


def _meet_and_load(plan: WorkerPlan, store: Any, rank: int, num_ranks: int, *, key: str, host: str) -> LoadedRank:
    group = ProcessRank(
        store,
        rank,
        num_ranks,
        key=key,
        host=host,
        device=torch.device(plan.engine.device),
        meet_s=plan.config.workers.start_timeout_s,
        # On a GPU the library's own sum is quicker, and one more thing of the tolerance class.
        is_ordered=plan.engine.device == "cpu" or plan.engine.numerics is NumericsKind.INVARIANT,
    )
    return _load(plan, group)


def _load(plan: WorkerPlan, group: RankGroup) -> LoadedRank:
    return load_rank(
        _folder_on_this_node(plan),
        plan.engine,
        max_model_len=plan.config.model.max_model_len,
        num_threads=plan.num_threads,
        group=group,
    )


def _folder_on_this_node(plan: WorkerPlan) -> Path:
    """Return the model's folder; on a node other than the one that started the deployment it may have to be made."""
    folder, model = Path(plan.model_folder), plan.config.model
    if model.revision is not None:
        # A hub id, and the commit that was found. What is being downloaded exists before it is whole.
        return download(model.path, model.revision, cache_dir(), _log_progress)
    return folder if folder.exists() else prepare_model(model.path, cache_dir(), _log_progress)


def _log_progress(stage: str, share: float) -> None:
    logger.info("%s: %.0f %%", stage, 100 * share)


async def _serve(
    plan: WorkerPlan,
    host: str,
    loaded: LoadedRank,
    leader: GangLeader | None,
    notes: tuple[str, ...],
    resolve_controller: ResolveEndpoint,
    end_process: EndProcess,
) -> Worker:
    clock = SystemClock()
    assembled = await asyncio.to_thread(
        assemble_loaded,
        loaded,
        plan.engine,
        num_threads=plan.num_threads,
        clock=clock,
        promised_share=plan.config.transfer.promised_share,
        followers=leader,
        notes=notes,
    )
    copier = make_copier(loaded.store)
    await asyncio.to_thread(copier.warm_up)
    settings = WorkerSettings(
        host=host,
        channel=plan.channel,
        transfer=plan.config.transfer,
        copiers=(copier,),
        max_waiting=plan.engine.max_waiting,
        clock=clock,
        gang=leader,
        end_process=end_process,
        lease_s=plan.config.workers.lease_s,
    )
    memory_bytes = assembled.resident_bytes + (0 if leader is None else leader.memory_bytes)
    worker = Worker(assembled.engine, settings, partial(_describe, assembled, plan, memory_bytes), resolve_controller)
    if leader is not None:
        leader.watch(lambda: assembled.engine.times.predicted_s)
    await worker.start()
    return worker


def _describe(assembled: AssembledEngine, plan: WorkerPlan, memory_bytes: int, endpoint: Endpoint) -> WorkerInfo:
    model, layout = assembled.model, assembled.store.layout
    return WorkerInfo(
        worker_id=plan.worker_id,
        incarnation=draw_incarnation(),
        role=plan.role,
        endpoint=endpoint,
        pid=os.getpid(),
        device=plan.engine.device,
        num_ranks=plan.engine.tensor_parallel,
        model_name=plan.served_name,
        model_digest=model.digest,
        numerics_digest=assembled.numerics.digest,
        numerics_class=assembled.numerics.numerics_class,
        numerics_note=assembled.numerics.note,
        vocab_size=model.spec.vocab_size,
        max_model_len=assembled.max_model_len,
        num_blocks=max(assembled.memory.num_blocks),
        block_size=plan.engine.block_size,
        max_running=plan.engine.max_running,
        max_batch_tokens=plan.engine.max_batch_tokens,
        prefix_identity=assembled.engine.identity,
        kv_token_bytes=layout.num_layers * layout.token_bytes,
        memory_bytes=memory_bytes,
    )
