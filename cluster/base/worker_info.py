"""What the cluster knows of one worker: what it is, and how loaded it is."""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.base.ids import Incarnation, WorkerId


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
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """What a step of a worker's engine takes, in seconds, fitted to its steps so far; never negative."""

    base: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_context_kilotoken: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A load report. Gauges are instants; counters grow over the worker's life."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prompt_tokens: int = 0
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
    num_receiving: int = 0
    """Requests whose KV is awaited from a prefill worker."""
    num_sending: int = 0
    """Prefills computed for decode workers."""
    has_runnable_work: bool = False
    predicted_step_s: float = 0.0
    step_fit: StepFit = StepFit()
    links: tuple[LinkView, ...] = ()


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
class ClusterStatus:
    """What `pdserve status` shows."""

    workers: tuple[WorkerView, ...]
    starting: tuple[WorkerId, ...]
    last_deaths: tuple[WorkerDeath, ...]
    controller_pid: int
