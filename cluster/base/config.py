"""The configuration of a deployment: one frozen tree, read from YAML and overridden by flags.

This is the only file that reads YAML. An unknown key is refused with its path and the nearest valid name; nothing is
accepted and ignored.
"""

import difflib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.worker_info import Role

Tree = dict[str, "Tree | list[Tree] | str | int | float | bool | None"]

DEMO_MODEL = "demo"
CUDA_KV = (KVDtype.BFLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT8)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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


class ModelConfig(_Section):
    """Which model is served."""

    path: str = DEMO_MODEL
    """A folder in the Hugging Face layout, a .gguf file, a hub id (`organisation/name`, downloaded once a node), or
    `demo` (Gemma-3-270M of the `demo` extra)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; by default its main branch. All workers serve the commit that it names when
    the deployment starts."""
    served_name: str | None = None
    """The name clients use; by default the folder's or file's name."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and output together; by default what the model and the KV pool allow."""


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


class EngineConfig(_Section):
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
    def _defaults_of_the_device(cls, values: "Tree") -> "Tree":
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


class TransportKind(StrEnum):
    """How KV travels between two workers."""

    SHM = "shm"
    NIXL = "nixl"
    TCP = "tcp"
    TORCH_DIST = "torch_dist"


class TransferConfig(_Section):
    """The KV hand-off from prefill to decode workers."""

    transports: tuple[TransportKind, ...] = Field(default=(TransportKind.SHM, TransportKind.TCP), min_length=1)
    """In this order; a link takes the first that both sides can use, and when it breaks its transfers go on over the
    next one (shm: same machine and user; nixl: the `nixl` package and its backend; torch_dist: Gloo)."""
    nixl_backend: str = "UCX"
    """Backend of NIXL. UCX is tested, over host memory; others are passed through by name."""
    slot_bytes: int = Field(default=4 << 20, ge=64 << 10, le=1 << 30)
    """Size of a landing slot: the most that one chunk carries."""
    base_slots: int = Field(default=2, ge=1)
    """Slots that every link owns."""
    max_slots_per_link: int = Field(default=4, ge=1)
    """Slots that a busy link may hold. More do not make it faster once they no longer fit the processor's cache."""
    max_slots: int = Field(default=64, ge=1)
    """Slots that all links of a prefill worker may hold; a link beyond that waits until there is room."""
    promised_share: float = Field(default=0.25, gt=0, le=1)
    """Part of a decode worker's KV pool that may be promised to prefills that have not started."""
    stall_s: float = Field(default=2.0, gt=0)
    """A link that returns no credit for this long is closed, and its transfers go on over the next one; after half of
    it, it takes no new ones."""
    streaming_timeout_s: float = Field(default=3.0, gt=0)
    """A prefill that runs and makes no progress for this long (or two predicted steps) is given up."""
    queued_timeout_s: float = Field(default=10.0, gt=0)
    """A prefill that waits while its worker computes nothing for this long is given up."""
    deadline_s: float = Field(default=600.0, gt=0)
    """The longest that one transfer may take."""
    test_interval_s: float = Field(default=60.0, gt=0)
    """An idle link is tested this often."""

    @model_validator(mode="after")
    def _slots_fit(self) -> "TransferConfig":
        if not self.base_slots <= self.max_slots_per_link <= self.max_slots:
            raise ValueError("transfer: base_slots <= max_slots_per_link <= max_slots must hold")
        return self


class GangStrategy(StrEnum):
    """How Ray places the ranks of a worker."""

    PACK = "PACK"
    STRICT_PACK = "STRICT_PACK"
    SPREAD = "SPREAD"
    STRICT_SPREAD = "STRICT_SPREAD"


class WorkersConfig(_Section):
    """How many workers of each role, and what Ray gives each. Without any number: one prefill and one decode worker."""

    prefill: int = Field(default=0, ge=0, le=1024)
    """Workers that compute prompts for decode workers."""
    decode: int = Field(default=0, ge=0, le=1024)
    """Workers that own requests; prefill workers compute their prompts."""
    mixed: int = Field(default=0, ge=0, le=1024)
    """Workers that own requests and compute their prompts themselves."""
    engine: dict[Role, dict[str, str | int | float | bool | None]] = Field(default_factory=dict)
    """Settings of `engine` that differ for a role, for example `decode: {kv_dtype: int8, block_size: 32}`: KV is
    converted on its way."""
    decode_batch_tokens: int = Field(default=128, ge=1)
    """Token budget of a decode worker's step, unless `engine` here sets one: bounds what a prompt that it computes
    itself costs its streams."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each rank of a worker (one, unless engine.tensor_parallel)."""
    gang_strategy: GangStrategy = GangStrategy.PACK
    """How Ray places the ranks of a worker: PACK on as few nodes as possible, STRICT_PACK on one, SPREAD on different
    ones where possible, STRICT_SPREAD always."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """A worker that is not READY by then is replaced."""
    stall_timeout_s: float = Field(default=10.0, gt=0)
    """A worker that has work and makes no step for this long (or five predicted steps) is replaced."""
    restart_backoff_s: float = Field(default=1.0, gt=0)
    """Pause before a dead worker is replaced; doubles with each death in a row, up to 60 s."""

    @model_validator(mode="before")
    @classmethod
    def _one_pair_by_default(cls, values: "Tree") -> "Tree":
        if not isinstance(values, dict) or any(values.get(role.value) is not None for role in Role):
            return values
        return {**values, Role.PREFILL.value: 1, Role.DECODE.value: 1}

    @model_validator(mode="after")
    def _someone_owns_requests(self) -> "WorkersConfig":
        if self.prefill and not self.decode:
            raise ValueError("workers.prefill: prefill workers need a decode worker (workers.decode, --decode)")
        if not self.decode and not self.mixed:
            raise ValueError("workers: at least one decode or mixed worker must own requests (--decode, --mixed)")
        return self

    def count(self, role: Role) -> int:
        """Return how many workers of a role are wanted."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}[role]

    @property
    def total(self) -> int:
        """Workers of all roles."""
        return sum(self.count(role) for role in Role)


class IngressConfig(_Section):
    """The HTTP front."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Ingress replicas."""
    haproxy: bool = True
    """Serve's HAProxy front; false uses Serve's own proxy, which saturates early."""
    max_ongoing_requests: int = Field(default=1024, ge=1)
    """Requests that one replica holds at once."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """A larger request body is refused with 413."""
    graceful_shutdown_s: float = Field(default=600.0, ge=0)
    """How long a leaving replica may finish its streams."""
    route_timeout_s: float = Field(default=1.0, gt=0)
    """After this long without an answer of the controller the replica routes on its last view."""
    token_timeout_s: float = Field(default=600.0, gt=0)
    """A request that sees no new token for this long ends with an error; it is not replayed."""
    max_attempts: int = Field(default=3, ge=1, le=16)
    """A request whose worker died is replayed on another; after this many deaths it ends with an error (it may be the
    cause)."""
    replay_timeout_s: float = Field(default=60.0, ge=0)
    """How long a request whose worker died waits for another worker to be ready."""


class ChannelConfig(_Section):
    """Deadlines of the channels between processes."""

    heartbeat_s: float = Field(default=1.0, gt=0)
    """Interval of heartbeats."""
    silence_s: float = Field(default=5.0, gt=0)
    """A peer not heard for this long is taken for dead."""

    @model_validator(mode="after")
    def _silence_is_longer(self) -> "ChannelConfig":
        if self.silence_s <= self.heartbeat_s:
            raise ValueError("channel.silence_s must be longer than channel.heartbeat_s")
        return self


class RayConfig(_Section):
    """The Ray cluster that `pdserve up` starts."""

    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs the head offers; by default the machine's."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the head may take to answer."""


class DeploymentConfig(_Section):
    """A deployment: everything `pdserve up` needs."""

    name: str = Field(default="pdserve", pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Name of the deployment; two on one machine need two names and two ports."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    workers: WorkersConfig = WorkersConfig()
    ingress: IngressConfig = IngressConfig()
    channel: ChannelConfig = ChannelConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _links_fit(self) -> "DeploymentConfig":
        needed = self.workers.decode * self.transfer.base_slots
        if self.workers.prefill and needed > self.transfer.max_slots:
            raise ValueError(
                f"transfer.max_slots {self.transfer.max_slots}: {self.workers.decode} decode workers need {needed} "
                "(transfer.base_slots each)"
            )
        return self

    @model_validator(mode="after")
    def _role_engines_are_right(self) -> "DeploymentConfig":
        for role, changes in self.workers.engine.items():
            if changes.get("device", self.engine.device) != self.engine.device:
                raise ValueError(f"workers.engine.{role.value}.device: all workers run on one device (engine.device)")
            try:
                self.engine_of(role)
            except ValidationError as error:
                first = error.errors()[0]
                path = ".".join(str(part) for part in ("workers.engine", role.value, *first["loc"]))
                message = first["msg"]
                if first["type"] == "extra_forbidden":
                    message = _unknown(str(first["loc"][-1]), EngineConfig)
                raise ValueError(f"{path}: {message.removeprefix('Value error, ')}") from error
        return self

    def engine_of(self, role: Role) -> EngineConfig:
        """Return the engine section of a role: with what differs for it, and a decode worker's smaller steps."""
        engine, changes = self.engine, self.workers.engine.get(role, {})
        if changes:
            engine = EngineConfig.model_validate({**engine.model_dump(), **changes})
        if role is not Role.DECODE or "max_batch_tokens" in changes:
            return engine
        budget = min(engine.max_batch_tokens, self.workers.decode_batch_tokens)
        return engine.model_copy(update={"max_batch_tokens": budget})

    def threads_of(self, role: Role) -> int:
        """Return the threads of the engine of a role's workers, at least one."""
        return self.engine_of(role).num_threads or max(1, int(self.workers.num_cpus))


def load_config(path: Path | None, overrides: Mapping[str, str] | None = None) -> DeploymentConfig:
    """Read YAML from `path` (None: defaults), apply `overrides` (dotted key → YAML scalar), validate.

    Raises ConfigError that names every bad key by its path.
    """
    tree = _read_yaml(path) if path is not None else {}
    for key, text in (overrides or {}).items():
        _assign(tree, key, text)
    try:
        return DeploymentConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def to_yaml(config: DeploymentConfig) -> str:
    """Return the whole effective configuration as YAML."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


def _read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping")
    return tree


def _assign(tree: Tree, key: str, text: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent} is a value, not a section")
        tree = child
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from error


def _section_at(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] = DeploymentConfig
    for part in path:
        field = section.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        section = field.annotation
    return section


def _unknown(key: str, section: type[BaseModel] | None) -> str:
    known = list(section.model_fields) if section is not None else []
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return "unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}")


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: {_unknown(str(item['loc'][-1]), _section_at(item['loc'][:-1]))}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            names_itself = not path or message.startswith(path)
            lines.append(message if names_itself else f"{path}: {message}")
    return "\n".join(lines)


def field_default(dotted: str) -> str:
    """Return what a configuration key is if nobody sets it, for command-line help."""
    value: object = DeploymentConfig()
    for part in dotted.split("."):
        value = getattr(value, part)
    return "none" if value is None else str(value)


def field_help(dotted: str) -> str:
    """Return the documentation of a configuration key, for command-line help."""
    *parents, last = dotted.split(".")
    section = _section_at(tuple(parents))
    if section is None or last not in section.model_fields:
        raise KeyError(dotted)
    return section.model_fields[last].description or ""
