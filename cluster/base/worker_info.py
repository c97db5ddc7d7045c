"""What the cluster knows of one worker: what it is, and how loaded it is."""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.prefix_hash import PrefixIdentity


class Role(StrEnum):
    """What a worker does. MIXED owns requests and prefills them itself; DECODE owns requests and has prefill workers
    compute their prompts; PREFILL owns none.
    """

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def owns_requests(self) -> bool:
        """True if an ingress may send requests to it."""
        return self is not Role.PREFILL


class WorkerState(StrEnum):
    """Life of a worker as the controller sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class NumericsClass(StrEnum):
    """BITWISE: the self-test proved batch-independent bits. TOLERANCE: it did not, or the backend cannot."""

    BITWISE = "bitwise"
    TOLERANCE = "tolerance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a channel server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """One link of a worker, for status: the source it fetches KV from, the state, and what went over it."""

    peer: WorkerId
    transport: str
    state: str
    source_rank: int
    sink_rank: int
    num_transfers: int
    num_bytes: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Facts of one worker life; none changes while it lives."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    endpoint: Endpoint
    pid: int
    device: str
    num_ranks: int = 1
    """Tensor-parallel processes of the worker; `pid` is rank 0's."""
    model_name: str
    model_digest: str
    numerics_digest: str
    numerics_class: NumericsClass
    numerics_note: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_running: int
    max_batch_tokens: int
    """Tokens of a step at most."""
    prefix_identity: PrefixIdentity
    """What the worker's names of prefixes begin with."""
    kv_token_bytes: int
    """KV of one token in all layers, over all ranks."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """What a step of a worker's engine takes, in seconds, fitted to its steps so far; never negative."""

    base: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_context_kilotoken: float = 0.0
    """Of context that rows with one token read."""
    per_kilopair: float = 0.0
    """Of a query with a key, in rows with several tokens."""
    num_observations: float = 0.0
    """Steps that count; old ones count less."""
    relative_error: float = 1.0
    """Mean of |predicted / measured - 1|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFit:
    """How long after a prompt's end its KV is whole: latency + per_byte · (bytes not sent by then), in seconds."""

    source: WorkerId
    latency: float
    per_byte: float
    num_observations: float
    relative_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A load report. Gauges are instants; counters grow over the worker's life."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prompt_tokens: int = 0
    num_context_tokens: int = 0
    """Of the sequences that run: what their next tokens read."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks whose content still serves hits."""
    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_preemptions: int = 0
    num_admitted_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    """Of the admitted ones, those whose KV was cached."""
    num_loaded_blocks: int = 0
    """Blocks copied back from the host tier."""
    num_recomputed_tokens: int = 0
    """Computed again after a preemption."""
    num_arrivals: int = 0
    """Requests and prefills that were sent here."""
    num_receiving: int = 0
    """Requests whose KV is awaited from a prefill worker."""
    num_sending: int = 0
    """Prefills computed for decode workers."""
    has_runnable_work: bool = False
    is_draining: bool = False
    """It takes no new requests: it was told so."""
    predicted_step_s: float = 0.0
    step_fit: StepFit = StepFit()
    links: tuple[LinkView, ...] = ()
    transfer_fits: tuple[TransferFit, ...] = ()
    """By the workers it fetches KV from."""

    @property
    def is_idle(self) -> bool:
        """True if nobody waits for anything of this worker."""
        return not (self.num_running or self.num_waiting or self.num_receiving or self.num_sending)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker in the cluster view."""

    info: WorkerInfo
    state: WorkerState
    load: WorkerLoad
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeath:
    """Why a worker ended."""

    worker_id: WorkerId
    cause: str
    is_permanent: bool = False
    """True if another start would end the same way: the model cannot be loaded, or the configuration cannot hold."""

    def __str__(self) -> str:
        return f"{self.worker_id}: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPause:
    """A role whose workers died in a row: the next one is not started yet."""

    role: Role
    num_deaths: int
    left_s: float
    is_benched: bool
    """So many that another start hardly helps: it is tried again after minutes."""

    def __str__(self) -> str:
        what = "benched: " if self.is_benched else ""
        return f"{self.role}: {what}{self.num_deaths} deaths in a row, the next start in {self.left_s:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What `pdserve status` shows."""

    workers: tuple[WorkerView, ...]
    starting: tuple[WorkerId, ...]
    last_deaths: tuple[WorkerDeath, ...]
    controller_pid: int
    pauses: tuple[StartPause, ...] = ()
    rollout: str = ""
    """How far a rolling restart is."""
