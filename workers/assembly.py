"""Puts a worker's engine together from its configuration: model, KV store, runner, engine; or one rank of it.

The same for actors, tests and benchmarks.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numba
import psutil
import torch

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.engine_config import AttentionKind, EngineConfig, StrategyKind
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.rank_step import Followers
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.strategies import Fair, FirstCome, Priority, ShortestPrefill, Strategy
from pdserve.workers.kv.host_tier import HostSlots, HostTier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.memory_plan import MemoryPlan, device_kv_gib, kv_layout, plan_memory
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.loader import LoadedModel, load_model, read_model_spec
from pdserve.workers.model.parallel import SOLO, RankGroup
from pdserve.workers.model.runner import FollowingRunner, RankRunner, TransformerRunner
from pdserve.workers.model.self_test import Numerics, SelfTest

logger = logging.getLogger(__name__)


def make_strategy(config: EngineConfig) -> Strategy:
    """Return the scheduling strategy that a configuration names."""
    match config.strategy:
        case StrategyKind.FCFS:
            return FirstCome()
        case StrategyKind.PRIORITY:
            return Priority()
        case StrategyKind.SHORTEST_PREFILL:
            return ShortestPrefill(config.ageing_tokens_per_s)
        case StrategyKind.FAIR:
            return Fair(config.fair_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """One rank of a model and its KV, before it has computed anything.

    Attributes:
        memory: of each rank of the worker; all ranks have equally many blocks.
    """

    model: LoadedModel
    store: KVStore
    memory: MemoryPlan


def load_rank(
    folder: Path, config: EngineConfig, *, max_model_len: int | None, num_threads: int, group: RankGroup
) -> LoadedRank:
    """Load this rank's part of the model in `folder`.

    Raises CheckpointError for the model and ConfigError for the configuration.
    """
    spec = read_model_spec(folder, config.runner)
    device = torch.device(config.device)
    kv_memory_gib = None
    if device.type == "cuda" and config.kv_memory_gib is None:
        # What the GPU with the least can hold: all ranks have equally many blocks.
        kv_memory_gib = group.all_reduce_min(device_kv_gib(spec, config, *torch.cuda.mem_get_info(device)))
    memory = plan_memory(spec, config, max_model_len, kv_memory_gib)
    logger.info("memory: %s", memory)
    # Its other layers abort the process, or cost more, when two threads call kernels at once.
    numba.config.THREADING_LAYER = "omp"
    # Packing probes kernels at the thread count that will run them.
    torch.set_num_threads(num_threads)
    model = load_model(
        folder,
        linear=config.linear,
        attention=config.attention,
        device=device,
        max_model_len=memory.max_model_len,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        group=group,
        runner=config.runner,
        numerics=config.numerics,
    )
    layout = kv_layout(
        model.spec, config.block_size, model_digest=model.digest, kv_dtype=config.kv_dtype, tp_size=group.size
    )
    # On a GPU, one more: graphs of padded batches need a block that nobody owns.
    counts = [count + 1 for count in memory.num_blocks] if device.type == "cuda" else memory.num_blocks
    store = KVStore(layout, num_blocks=counts, device=device, rank=group.rank)
    return LoadedRank(model=model, store=store, memory=memory)


def _capture_graphs(runner: RankRunner, loaded: LoadedRank, config: EngineConfig) -> None:
    """Capture decode steps where that is possible: FlashInfer plans each step on the host."""
    can_capture = loaded.model.attention in (AttentionKind.VARLEN, AttentionKind.TRITON)
    if config.device == "cuda" and config.cuda_graphs and can_capture:
        runner.capture_graphs(max_rows=config.max_running, max_tokens=loaded.memory.max_model_len)


def make_follower(loaded: LoadedRank, config: EngineConfig, *, num_threads: int) -> FollowingRunner:
    """Return the runner of a rank other than 0; on the thread that runs its steps. Raises RankLostError."""
    host_blocks = loaded.memory.host_blocks
    host = HostSlots(loaded.store, host_blocks) if host_blocks else None
    runner = FollowingRunner(loaded.model, loaded.store, num_threads=num_threads, host=host)
    runner.bind_thread()
    _capture_graphs(runner, loaded, config)
    return runner


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledEngine:
    """An engine that passed its self-test, and what was measured on the way."""

    engine: Engine
    store: KVStore
    runner: TransformerRunner
    model: LoadedModel
    numerics: Numerics
    memory: MemoryPlan
    max_model_len: int
    resident_bytes: int


def assemble_engine(
    folder: Path,
    config: EngineConfig,
    *,
    max_model_len: int | None,
    num_threads: int,
    clock: Clock,
    promised_share: float = 0.25,
    group: RankGroup = SOLO,
    followers: Followers | None = None,
) -> AssembledEngine:
    """Load the model in `folder` and return its engine, self-tested and warm; `followers` are the other ranks.

    Raises CheckpointError for the model, ConfigError for the configuration, RankLostError if a rank is lost.
    """
    loaded = load_rank(folder, config, max_model_len=max_model_len, num_threads=num_threads, group=group)
    return assemble_loaded(
        loaded, config, num_threads=num_threads, clock=clock, promised_share=promised_share, followers=followers
    )


def assemble_loaded(
    loaded: LoadedRank,
    config: EngineConfig,
    *,
    num_threads: int,
    clock: Clock,
    promised_share: float,
    followers: Followers | None = None,
    notes: tuple[str, ...] = (),
) -> AssembledEngine:
    """Return the engine of a loaded rank 0; `notes` say why other ranks' parts are not in the bitwise class.

    Raises RankLostError if a rank is lost.
    """
    model, store, memory = loaded.model, loaded.store, loaded.memory
    runner = TransformerRunner(model, store, num_threads=num_threads, followers=followers)
    runner.bind_thread()
    _capture_graphs(runner, loaded, config)
    self_test = SelfTest(runner)
    numerics = self_test.run(notes)
    if numerics.note:
        logger.warning("tolerance class: %s", numerics.note)
    token_s = self_test.warm_up()
    host = None
    if memory.host_blocks:
        host = HostTier(store, memory.host_blocks, clock)
    engine = Engine(
        _scheduler_settings(config, model.spec, memory),
        runner,
        layout=store.layout,
        num_blocks=memory.num_blocks,
        clock=clock,
        promised_share=promised_share,
        numerics_digest=numerics.digest,
        strategy=make_strategy(config),
        host=host,
        itl_target_s=None if config.itl_target_ms is None else config.itl_target_ms / 1000,
    )
    engine.times.calibrate(token_s, config.max_batch_tokens)
    return AssembledEngine(
        engine=engine,
        store=store,
        runner=runner,
        model=model,
        numerics=numerics,
        memory=memory,
        max_model_len=memory.max_model_len,
        resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
    )


def _scheduler_settings(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan) -> SchedulerSettings:
    return SchedulerSettings(
        block_size=config.block_size,
        max_running=config.max_running,
        max_batch_tokens=config.max_batch_tokens,
        max_waiting=config.max_waiting,
        max_model_len=memory.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        has_prefix_cache=config.prefix_cache,
        max_waiting_tokens=config.max_waiting_tokens,
        skip_age_s=config.skip_age_s,
        victim=config.victim,
    )
