"""Puts a worker's engine together from its configuration: memory arithmetic, model, KV store, runner, engine.

The same for actors, tests and benchmarks.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import psutil
import torch

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import EngineConfig, LinearKind, StrategyKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.sequence import blocks_for
from pdserve.workers.engine.strategies import Fair, FirstCome, Priority, ShortestPrefill, Strategy
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.kv.store import KVStore, block_bytes
from pdserve.workers.model.families import ModelSpec, read_spec
from pdserve.workers.model.loader import LoadedModel, load_model
from pdserve.workers.model.runner import Numerics, TransformerRunner, num_probe_blocks

logger = logging.getLogger(__name__)

WEIGHT_BYTES = {LinearKind.FP32: 4, LinearKind.FP16: 2, LinearKind.INT8: 1}
WINDOW_CACHE_SHARE = 0.25
PROCESS_BYTES = 1000 << 20
"""Interpreter, libraries and working memory of a worker process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What one worker needs, in bytes, and what follows from it."""

    weights_bytes: int
    embedding_bytes: int
    kv_bytes: int
    num_blocks: tuple[int, ...]
    """One number per KV group."""
    host_bytes: int = 0
    host_blocks: tuple[int, ...] = ()
    """Blocks of the host tier, one number per KV group; empty without one."""
    max_model_len: int

    @property
    def total_bytes(self) -> int:
        """Everything that is resident."""
        return self.weights_bytes + self.embedding_bytes + self.kv_bytes + self.host_bytes + PROCESS_BYTES

    @property
    def _blocks_text(self) -> str:
        counts = sorted(set(self.num_blocks), reverse=True)
        return " and ".join(str(count) for count in counts)

    @property
    def _host_text(self) -> str:
        if not self.host_blocks:
            return ""
        return f"+ host tier {self.host_bytes / (1 << 30):.2f} GiB ({max(self.host_blocks)} blocks) "

    def __str__(self) -> str:
        gib = 1 << 30
        return (
            f"packed weights {self.weights_bytes / gib:.2f} GiB "
            f"+ embedding {self.embedding_bytes / gib:.2f} GiB (mapped) "
            f"{self._host_text}+ KV {self.kv_bytes / gib:.2f} GiB ({self._blocks_text} blocks) "
            f"+ process {PROCESS_BYTES / gib:.2f} GiB "
            f"= {self.total_bytes / gib:.2f} GiB per worker; at most {self.max_model_len} tokens a request"
        )


def plan_memory(spec: ModelSpec, engine: EngineConfig, max_model_len: int | None) -> MemoryPlan:
    """Return the memory arithmetic of one worker. Raises ConfigError if the keys cannot hold together."""
    layout = kv_layout(spec, engine.block_size, model_digest="", kv_dtype=engine.kv_dtype)
    num_blocks = plan_blocks(layout, engine, engine.kv_memory_gib)
    host_blocks = plan_blocks(layout, engine, engine.host_memory_gib) if engine.host_memory_gib else ()
    if host_blocks and min(host_blocks) == 0:
        raise ConfigError(f"engine.host_memory_gib {engine.host_memory_gib:g}: holds no block of every KV group")
    per_block = sum(block_bytes(layout, group) for group in range(len(num_blocks)))
    least = num_probe_blocks(engine.block_size)
    if min(num_blocks) < least:
        raise ConfigError(
            f"engine.kv_memory_gib {engine.kv_memory_gib:g}: holds {min(num_blocks)} blocks of {per_block} bytes; "
            f"this model needs at least {least} ({least * per_block / (1 << 30):.3f} GiB)"
        )
    pool_tokens = max(num_blocks) * engine.block_size
    limit = min(spec.max_position, pool_tokens)
    if max_model_len is not None:
        if max_model_len > limit:
            which = "the model" if spec.max_position < pool_tokens else "the KV pool (engine.kv_memory_gib)"
            raise ConfigError(f"model.max_model_len {max_model_len}: {which} allows {limit} tokens")
        limit = max_model_len
    matrix = _matrix_values(spec)
    return MemoryPlan(
        weights_bytes=matrix * WEIGHT_BYTES[engine.linear],
        embedding_bytes=spec.vocab_size * spec.hidden_size * 2,
        kv_bytes=_pool_bytes(layout, num_blocks),
        host_bytes=_pool_bytes(layout, host_blocks),
        host_blocks=host_blocks,
        num_blocks=num_blocks,
        max_model_len=limit,
    )


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


def _pool_bytes(layout: KVLayout, num_blocks: Sequence[int]) -> int:
    return sum(count * block_bytes(layout, group) for group, count in enumerate(num_blocks))


def plan_blocks(layout: KVLayout, engine: EngineConfig, memory_gib: float) -> tuple[int, ...]:
    """Share memory among the KV groups; return the blocks of each.

    Equal numbers serve short contexts best, so a group with a window gets as many as the others, but no more than a
    full batch ever holds, and WINDOW_CACHE_SHARE of that for cached prefixes; the rest goes to groups without windows.
    """
    memory = int(memory_gib * (1 << 30))
    sizes = [block_bytes(layout, group) for group in range(len(layout.groups))]
    equal = memory // sum(sizes)
    counts = [equal] * len(sizes)
    windowed = [group for group, spec in enumerate(layout.groups) if spec.window]
    if not windowed or len(windowed) == len(sizes):
        return tuple(counts)
    for group in windowed:
        window = layout.groups[group].window
        step_blocks = blocks_for(engine.max_batch_tokens, layout.block_size)
        batch = engine.max_running * (blocks_for(window, layout.block_size) + 2) + step_blocks
        counts[group] = min(equal, int(batch * (1 + WINDOW_CACHE_SHARE)))
    left = memory - sum(counts[group] * sizes[group] for group in windowed)
    whole = left // sum(size for group, size in enumerate(sizes) if group not in windowed)
    return tuple(count if group in windowed else whole for group, count in enumerate(counts))


def kv_layout(spec: ModelSpec, block_size: int, *, model_digest: str, kv_dtype: KVDtype) -> KVLayout:
    """Return the layout of a model's KV."""
    return KVLayout(
        model_digest=model_digest,
        kv_dtype=kv_dtype,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        groups=tuple(GroupLayout(window=group.window, layers=group.layers) for group in spec.groups),
    )


def check_memory(plans: Sequence[MemoryPlan], available_bytes: int) -> None:
    """Raise ConfigError with the arithmetic if the workers, one for each plan, cannot fit."""
    needed = sum(plan.total_bytes for plan in plans)
    if needed > available_bytes:
        gib = 1 << 30
        different = "; ".join(dict.fromkeys(map(str, plans)))
        raise ConfigError(
            f"not enough memory: {different}; {len(plans)} worker(s) need {needed / gib:.2f} GiB, "
            f"{available_bytes / gib:.2f} GiB are available. Lower engine.kv_memory_gib or the number of workers"
        )


def available_memory_bytes() -> int:
    """Return the memory a new process may take: the machine's, or the control group's if that is less."""
    available: int = psutil.virtual_memory().available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        available = min(available, limit - used + _cgroup_file_bytes())
    return available


def _cgroup_file_bytes() -> int:
    """Page cache counted in memory.current; the kernel gives it back under pressure."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _cgroup_bytes(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _matrix_values(spec: ModelSpec) -> int:
    per_layer = (
        spec.qkv_size * spec.hidden_size
        + spec.num_heads * spec.head_dim * spec.hidden_size
        + 3 * spec.intermediate_size * spec.hidden_size
    )
    return spec.num_layers * per_layer + spec.vocab_size * spec.hidden_size


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
) -> AssembledEngine:
    """Load the model in `folder` and return its engine, self-tested and warm.

    Raises CheckpointError for the model and ConfigError for the configuration.
    """
    spec = read_spec(folder)
    memory = plan_memory(spec, config, max_model_len)
    logger.info("memory: %s", memory)
    device = torch.device(config.device)
    # Its other layers abort the process, or cost more, when two threads call kernels at once.
    numba.config.THREADING_LAYER = "omp"
    # Packing probes kernels at the thread count that will run them.
    torch.set_num_threads(num_threads)
    model = load_model(
        folder, linear=config.linear, attention=config.attention, device=device, max_model_len=memory.max_model_len
    )
    layout = kv_layout(spec, config.block_size, model_digest=model.digest, kv_dtype=config.kv_dtype)
    store = KVStore(layout, num_blocks=memory.num_blocks, device=device)
    runner = TransformerRunner(model, store, num_threads=num_threads)
    runner.bind_thread()
    numerics = runner.self_test()
    if numerics.note:
        logger.warning("tolerance class: %s", numerics.note)
    token_s = runner.warm_up()
    host = None
    if memory.host_blocks:
        host = HostTier(store, memory.host_blocks, clock)
    engine = Engine(
        SchedulerSettings(
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
        ),
        runner,
        layout=layout,
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
