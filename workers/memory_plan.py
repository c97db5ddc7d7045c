"""The memory arithmetic of a worker: what its ranks need, what follows for its KV pool, and whether it fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.cluster.base.engine_config import EngineConfig, LinearKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.workers.engine.sequence import blocks_for
from pdserve.workers.kv.store import block_bytes
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.self_test import num_probe_blocks

WEIGHT_BYTES = {LinearKind.FP32: 4, LinearKind.FP16: 2, LinearKind.INT8: 1}
WINDOW_CACHE_SHARE = 0.25
WORKING_BYTES = 2 << 30
"""cuda: context, activations of a step, graphs and the workspaces of kernels."""
PROCESS_BYTES = 1000 << 20
"""Interpreter, libraries and working memory of a worker process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a worker needs, in bytes of each of its ranks, and what follows from it."""

    num_ranks: int = 1
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
    def rank_bytes(self) -> int:
        """Everything that is resident on one rank."""
        return self.weights_bytes + self.embedding_bytes + self.kv_bytes + self.host_bytes + PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        """Everything that is resident on all ranks."""
        return self.num_ranks * self.rank_bytes

    @property
    def _blocks_text(self) -> str:
        counts = sorted(set(self.num_blocks), reverse=True)
        return " and ".join(str(count) for count in counts)

    @property
    def _host_text(self) -> str:
        if not self.host_blocks:
            return ""
        return f"+ host tier {self.host_bytes / (1 << 30):.2f} GiB ({max(self.host_blocks)} blocks) "

    @property
    def _ranks_text(self) -> str:
        if self.num_ranks == 1:
            return ""
        return f", {self.num_ranks} ranks = {self.total_bytes / (1 << 30):.2f} GiB per worker"

    def __str__(self) -> str:
        gib = 1 << 30
        return (
            f"packed weights {self.weights_bytes / gib:.2f} GiB "
            f"+ embedding {self.embedding_bytes / gib:.2f} GiB (mapped) "
            f"{self._host_text}+ KV {self.kv_bytes / gib:.2f} GiB ({self._blocks_text} blocks) "
            f"+ process {PROCESS_BYTES / gib:.2f} GiB "
            f"= {self.rank_bytes / gib:.2f} GiB per {'worker' if self.num_ranks == 1 else 'rank'}"
            f"{self._ranks_text}; at most {self.max_model_len} tokens a request"
        )


def device_kv_gib(spec: ModelSpec, engine: EngineConfig, free_bytes: int, total_bytes: int) -> float:
    """Return the memory of the KV pool of a rank on a GPU with so much memory, of which so much is free now.

    What others hold counts against `engine.gpu_memory_share`. Raises ConfigError if nothing is left.
    """
    taken = total_bytes - free_bytes
    weights = _weights_bytes(spec, engine) + _embedding_bytes(spec, engine)
    left = int(engine.gpu_memory_share * total_bytes) - taken - weights - WORKING_BYTES
    if left <= 0:
        gib = 1 << 30
        raise ConfigError(
            f"engine.gpu_memory_share {engine.gpu_memory_share:g} of {total_bytes / gib:.1f} GiB: nothing is left for "
            f"KV after {taken / gib:.1f} GiB in use, {weights / gib:.1f} GiB of weights and {WORKING_BYTES / gib:.1f} "
            "GiB to work with. Raise engine.tensor_parallel, or take a larger GPU"
        )
    return left / (1 << 30)


def _weights_bytes(spec: ModelSpec, engine: EngineConfig) -> int:
    return _matrix_values(spec) * WEIGHT_BYTES[engine.linear] // engine.tensor_parallel


def _embedding_bytes(spec: ModelSpec, engine: EngineConfig) -> int:
    if spec.num_weights is not None:
        return 0  # among the weights
    return spec.vocab_size * spec.hidden_size * 2 // engine.tensor_parallel


def plan_memory(
    spec: ModelSpec, engine: EngineConfig, max_model_len: int | None, kv_memory_gib: float | None = None
) -> MemoryPlan:
    """Return the memory arithmetic of one worker. Raises ConfigError if the keys cannot hold together.

    `kv_memory_gib` is that of a GPU (device_kv_gib), once it is known. Until then the plan holds the least: one text of
    full length.
    """
    num_ranks = engine.tensor_parallel
    spec.check_ranks(num_ranks)
    layout = kv_layout(spec, engine.block_size, model_digest="", kv_dtype=engine.kv_dtype, tp_size=num_ranks)
    kv_gib = engine.kv_memory_gib or kv_memory_gib
    if kv_gib is None:
        kv_gib = _least_gib(layout, max_model_len or spec.max_position)
    num_blocks = plan_blocks(layout, engine, kv_gib)
    host_blocks = plan_blocks(layout, engine, engine.host_memory_gib) if engine.host_memory_gib else ()
    if host_blocks and min(host_blocks) == 0:
        raise ConfigError(f"engine.host_memory_gib {engine.host_memory_gib:g}: holds no block of every KV group")
    per_block = sum(block_bytes(layout, group) for group in range(len(num_blocks)))
    least = num_probe_blocks(engine.block_size)
    if min(num_blocks) < least:
        raise ConfigError(
            f"engine.kv_memory_gib {kv_gib:g}: holds {min(num_blocks)} blocks of {per_block} bytes; "
            f"this model needs at least {least} ({least * per_block / (1 << 30):.3f} GiB)"
        )
    pool_tokens = max(num_blocks) * engine.block_size
    limit = min(spec.max_position, pool_tokens)
    if max_model_len is not None:
        if max_model_len > limit:
            which = "the model" if spec.max_position < pool_tokens else "the KV pool (engine.kv_memory_gib)"
            raise ConfigError(f"model.max_model_len {max_model_len}: {which} allows {limit} tokens")
        limit = max_model_len
    return MemoryPlan(
        num_ranks=num_ranks,
        weights_bytes=_weights_bytes(spec, engine),
        embedding_bytes=_embedding_bytes(spec, engine),
        kv_bytes=_pool_bytes(layout, num_blocks),
        host_bytes=_pool_bytes(layout, host_blocks),
        host_blocks=host_blocks,
        num_blocks=num_blocks,
        max_model_len=limit,
    )


def _least_gib(layout: KVLayout, num_tokens: int) -> float:
    blocks = blocks_for(num_tokens, layout.block_size) + num_probe_blocks(layout.block_size)
    return blocks * sum(block_bytes(layout, group) for group in range(len(layout.groups))) / (1 << 30)


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


def kv_layout(spec: ModelSpec, block_size: int, *, model_digest: str, kv_dtype: KVDtype, tp_size: int = 1) -> KVLayout:
    """Return the layout of a model's KV."""
    return KVLayout(
        model_digest=model_digest,
        kv_dtype=kv_dtype,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        groups=tuple(GroupLayout(window=group.window, layers=group.layers) for group in spec.groups),
        tp_size=tp_size,
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


def _matrix_values(spec: ModelSpec) -> int:
    if spec.num_weights is not None:
        return spec.num_weights
    per_layer = spec.qkv_size * spec.hidden_size + spec.num_heads * spec.head_dim * spec.hidden_size
    return spec.num_layers * per_layer + spec.num_mlp_values + spec.vocab_size * spec.hidden_size
