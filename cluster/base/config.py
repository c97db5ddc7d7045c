"""The configuration of a deployment: one frozen tree, read from YAML and overridden by flags.

This is the only file that reads YAML. An unknown key is refused with its path and the nearest valid name; nothing is
accepted and ignored.
"""

import difflib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from pdserve.cluster.base.config_section import Section, Tree
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.worker_info import Role

DEMO_MODEL = "demo"


class ModelConfig(Section):
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


class TransportKind(StrEnum):
    """How KV travels between two workers."""

    SHM = "shm"
    NIXL = "nixl"
    TCP = "tcp"
    TORCH_DIST = "torch_dist"


class TransferConfig(Section):
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


class WorkersConfig(Section):
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
    lease_s: float = Field(default=600.0, gt=0)
    """A worker that no controller has known for this long, and that serves nobody, ends itself."""
    drain_timeout_s: float = Field(default=600.0, gt=0)
    """A worker that drains is stopped after this long, whatever it still runs; that is replayed on others."""
    surge_timeout_s: float = Field(default=120.0, ge=0)
    """In a rolling restart a replacement that is not ready by then has no room: the old worker drains before it."""
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


class PlacementPolicy(StrEnum):
    """How the controller chooses workers."""

    JOINT = "joint"
    LEAST_LOADED = "least_loaded"


class PlacementConfig(Section):
    """Where requests go."""

    policy: PlacementPolicy = PlacementPolicy.JOINT
    """joint: owner and prefill worker together, by predicted time and cached prefixes; least_loaded: the baseline."""
    itl_weight: float = Field(default=1.0, ge=0)
    """What a second after the first token, or of the sequences that run, counts against one before the first token."""
    itl_guard_s: float | None = Field(default=None, gt=0)
    """A decode worker with running sequences computes prompts itself only if its steps are predicted to be shorter."""


class AdmissionConfig(Section):
    """Which requests are refused at once, with 429 and the prediction, because their first token would be late."""

    ttft_limit_s: float | None = Field(default=None, gt=0)
    """The limit of requests that name none, from their arrival to the first token. None: they wait."""
    classes: dict[str, float] = Field(default_factory=dict)
    """Limits by name; a request names its class in the header x-slo-class. It may also say x-slo-ttft-ms itself."""

    @model_validator(mode="after")
    def _limits_are_positive(self) -> "AdmissionConfig":
        for name, limit_s in self.classes.items():
            if not limit_s > 0:
                raise ValueError(f"admission.classes.{name}: must be greater than 0")
        return self


class IngressConfig(Section):
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


class ChannelConfig(Section):
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


class RayConfig(Section):
    """The Ray cluster that `pdserve up` starts."""

    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs the head offers; by default the machine's."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """How long the head may take to answer."""


class DeploymentConfig(Section):
    """A deployment: everything `pdserve up` needs."""

    name: str = Field(default="pdserve", pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Name of the deployment; two on one machine need two names and two ports."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    workers: WorkersConfig = WorkersConfig()
    placement: PlacementConfig = PlacementConfig()
    admission: AdmissionConfig = AdmissionConfig()
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
