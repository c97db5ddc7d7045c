"""The engine section of the configuration: what a worker, or all workers of a role, compute with."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from pdserve.cluster.base.config_section import Section, Tree
from pdserve.cluster.base.kv_layout import KVDtype

CUDA_KV = (KVDtype.BFLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT8)


class LinearKind(StrEnum):
    """How weight matrices are held and multiplied on CPU."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


class RunnerKind(StrEnum):
    """Whose code computes the model."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


class AttentionKind(StrEnum):
    """Which attention backend runs."""

    AUTO = "auto"
    NUMBA = "numba"
    TORCH = "torch"
    VARLEN = "varlen"
    FLASHINFER = "flashinfer"
    TRITON = "triton"


class NumericsKind(StrEnum):
    """What a token's bits may depend on."""

    DEFAULT = "default"
    INVARIANT = "invariant"


class StrategyKind(StrEnum):
    """Whose prompt tokens come first."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    SHORTEST_PREFILL = "shortest_prefill"
    FAIR = "fair"


class VictimKind(StrEnum):
    """Who is put back when blocks run out."""

    LATEST = "latest"
    """The last of the running batch: under fcfs the youngest."""
    LARGEST = "largest"
    """The one that frees the most blocks: the fewest are put back."""


class EngineConfig(Section):
    """The engine of each worker."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda)$")
    """cpu; or cuda: each rank has the GPU that Ray assigns to it. No worker has run on a GPU yet: see README."""
    runner: RunnerKind = RunnerKind.NATIVE
    """native: the engine's own decoder, for the families it covers. transformers: the code of that library, for most
    other decoders, over the same paged KV; one rank, fp32 weights, slower, tolerance class."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Ranks of a worker, each a process with `workers.num_cpus` (and a GPU of its own on cuda), which share its layers;
    must divide the model's attention heads and its KV heads, or be a multiple of the latter."""
    linear: LinearKind = LinearKind.FP16
    """fp32 or fp16 weights, with activations and sums in fp32; or int8 weights, with activations in 8 bits and a scale
    per token: a quarter of the memory of fp32, and less accurate (benchmarks/perplexity). On cuda, fp16 means weights
    and products in bf16, and there is no int8."""
    attention: AttentionKind = AttentionKind.AUTO
    """auto: numba on cpu; on cuda the first of flashinfer (where installed), varlen (torch's own), triton and torch
    that passes its self-test. numba: cpu, bitwise class. torch: the reference, any device, tolerance class."""
    numerics: NumericsKind = NumericsKind.DEFAULT
    """invariant: on cuda too a token's bits do not depend on its batch (attention without splits, products in fixed
    tiles, sums over ranks in order), which is slower; experimental. On cpu the default has this property already."""
    num_threads: int = Field(default=0, ge=0)
    """Threads of a worker's engine; 0 means the cores of `workers.num_cpus`."""
    block_size: int = Field(default=16, ge=16, multiple_of=16)
    """Tokens in a KV block."""
    kv_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of the KV pool of each rank of a worker; by default 1, and on cuda what `gpu_memory_share` leaves."""
    cuda_graphs: bool = True
    """cuda: capture decode steps at padded batch sizes and replay them (with attention by varlen or triton)."""
    gpu_memory_share: float = Field(default=0.9, gt=0, le=1)
    """cuda: part of the GPU's memory that weights, KV and the memory to work with may take."""
    kv_dtype: KVDtype = KVDtype.FLOAT32
    """float32; float16: half of the memory; or int8: keys and values in 8 bits with a scale per token and head, about a
    quarter, and less accurate (benchmarks/perplexity). Workers that exchange KV may differ: it is converted. On cuda:
    bfloat16 (the default there), float16, or float8 (e4m3), which are not converted."""
    host_memory_gib: float = Field(default=0.0, ge=0)
    """Memory of the host tier of each rank of a worker: copies of cached blocks, taken back when that is quicker than
    computing."""
    prefix_cache: bool = True
    """Keep the KV of what was computed, and take it over for requests that begin with the same tokens."""
    max_running: int = Field(default=64, ge=1, le=4096)
    """Most sequences in the running batch."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Token budget of a step: decodes first, then prefill chunks."""
    max_waiting: int = Field(default=512, ge=1)
    """Most requests waiting in a worker; one more is answered BUSY (HTTP 429)."""
    max_waiting_tokens: int = Field(default=1 << 20, ge=1)
    """Most tokens of requests waiting in a worker, beyond the first one; more is answered BUSY."""
    strategy: StrategyKind = StrategyKind.FCFS
    """fcfs: in order of arrival. priority: by a request's `priority`, lower first; it may take a running one's place.
    shortest_prefill: fewest prompt tokens left first, with ageing. fair: tenants (a request's `user`) in turn, by the
    tokens they have been served."""
    ageing_tokens_per_s: float = Field(default=200.0, gt=0)
    """shortest_prefill: a second of waiting counts like so many tokens less."""
    fair_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """fair: share of each tenant; 1 for those not named."""
    skip_age_s: float = Field(default=1.0, ge=0)
    """A request for which there are no blocks may be passed by others for this long."""
    victim: VictimKind = VictimKind.LATEST
    """Who is put back when blocks run out: the latest of the running batch, or the one that frees most."""
    itl_target_ms: float | None = Field(default=None, gt=0)
    """Steps that hold up decodes take in as many prompt tokens as this time allows, by the measured step times."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_device(cls, values: Tree) -> Tree:
        if not isinstance(values, dict):
            return values
        if values.get("device") == "cuda":
            return {"kv_dtype": KVDtype.BFLOAT16.value, **values}
        return values if values.get("kv_memory_gib") is not None else {**values, "kv_memory_gib": 1.0}

    @model_validator(mode="after")
    def _device_can_do_it(self) -> "EngineConfig":
        is_cuda = self.device == "cuda"
        if is_cuda and self.kv_dtype not in CUDA_KV:
            raise ValueError(f"engine.kv_dtype {self.kv_dtype}: on cuda it is one of {', '.join(CUDA_KV)}")
        if not is_cuda and self.kv_dtype in (KVDtype.BFLOAT16, KVDtype.FLOAT8):
            raise ValueError(f"engine.kv_dtype {self.kv_dtype}: on cuda only")
        if is_cuda and self.linear is LinearKind.INT8:
            raise ValueError("engine.linear int8: not on cuda yet")
        if is_cuda and self.attention is AttentionKind.NUMBA:
            raise ValueError("engine.attention numba: on cpu only")
        if not is_cuda and self.attention not in (AttentionKind.AUTO, AttentionKind.NUMBA, AttentionKind.TORCH):
            raise ValueError(f"engine.attention {self.attention}: on cuda only")
        if is_cuda and self.host_memory_gib:
            raise ValueError("engine.host_memory_gib: not on cuda yet")
        return self

    @model_validator(mode="after")
    def _can_be_invariant(self) -> "EngineConfig":
        if self.numerics is NumericsKind.INVARIANT:
            if self.runner is RunnerKind.TRANSFORMERS:
                raise ValueError("engine.numerics invariant: not with engine.runner transformers")
            if self.attention in (AttentionKind.TORCH, AttentionKind.FLASHINFER):
                raise ValueError(f"engine.numerics invariant: not with engine.attention {self.attention}")
        return self

    @model_validator(mode="after")
    def _fallback_is_plain(self) -> "EngineConfig":
        if self.runner is RunnerKind.TRANSFORMERS:
            if self.tensor_parallel > 1:
                raise ValueError("engine.tensor_parallel: engine.runner transformers runs on one rank")
            if self.linear is not LinearKind.FP32:
                raise ValueError("engine.linear: engine.runner transformers computes in fp32 (--linear fp32)")
        return self

    @model_validator(mode="after")
    def _host_tier_has_use(self) -> "EngineConfig":
        if self.host_memory_gib and not self.prefix_cache:
            raise ValueError("engine.host_memory_gib: the host tier needs engine.prefix_cache")
        return self
