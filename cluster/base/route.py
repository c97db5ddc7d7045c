"""The answer to "where does this request go"."""

from dataclasses import dataclass

from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.prefix_hash import PrefixIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The request would miss its limit, or nobody may take more."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixChain:
    """A prompt's whole units, by the names that workers of one identity give them; see prefix_hash.unit_chain."""

    identity: PrefixIdentity
    names: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeable:
    """What the placement knows of an attempt of a request.

    `num_tokens` are those of the prompt and those that were already emitted. `ttft_limit_s`: refuse it if its first
    token is predicted later; None: never.
    """

    request_id: RequestId
    attempt: int
    num_tokens: int
    max_tokens: int
    chains: tuple[PrefixChain, ...] = ()
    ttft_limit_s: float | None = None
    excluded: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Workers to try, best first: the first that does not answer BUSY owns the request.

    `prefill_worker_ids` compute its prompt if the owner is a decode worker; none of them alive: the owner does (LOCAL).
    """

    worker_ids: tuple[WorkerId, ...]
    prefill_worker_ids: tuple[WorkerId, ...] = ()
    reason: str
    predicted_ttft_s: float | None = None
    """From now to the first token; None if nothing predicts it."""
    refusal: Refusal | None = None
    """Why nobody should be asked, though there are workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way that was thought of for a request: who owns it, who prefills, and what that was predicted to take.

    Times are seconds. `total_s` is what was compared: the time to the first token, then `transfer_s`, `decode_s` and
    `inflicted_s` by their weight.
    """

    owner: WorkerId
    prefill: WorkerId | None
    """None: the owner does it itself."""
    is_chosen: bool
    room_s: float
    """Until the owner has a place and blocks."""
    queue_s: float
    """Prompts before this one."""
    compute_s: float
    """This prompt, without what is cached there."""
    transfer_s: float
    """From the first token until the KV is at its owner."""
    decode_s: float
    """The tokens after the first, as many as are expected."""
    inflicted_s: float
    """What others lose by it, summed over them."""
    num_cached_by_owner: int
    num_cached_by_prefill: int
    total_s: float

    @property
    def ttft_s(self) -> float:
        """The predicted time to the first token."""
        return self.room_s + self.queue_s + self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where an attempt of a request was sent, and why; `candidates` are the best ones, best first."""

    request_id: RequestId
    attempt: int
    age_s: float
    """How long ago."""
    num_prompt_tokens: int
    num_considered: int
    reason: str
    candidates: tuple[Candidate, ...]
