"""A request whose prompt other workers compute: what has arrived of it so far, over all tries."""

from dataclasses import dataclass, field, replace

from pdserve.cluster.base.ids import AttemptKey, WorkerId
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.cluster.base.request import Request
from pdserve.cluster.base.timeline import Timeline
from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.kvtransfer.layout import Coverage
from pdserve.kvtransfer.sink import SinkTransfer
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.handoff.source_peer import SourcePeer


@dataclass(slots=True, kw_only=True)
class Try:
    """One transfer: from whom, how far, and what was measured."""

    transfer: TransferId
    peer: SourcePeer
    machine: SinkTransfer
    num_tokens: int
    """Prompt and resume tokens whose KV is fetched."""
    limit_s: float
    posted_time: float
    first_chunk_time: float | None = None
    last_chunk_time: float | None = None
    token_time: float | None = None
    link_losses: dict[int, int] = field(default_factory=dict)
    """By stream."""
    num_bytes: int = 0
    num_late_bytes: int | None = None
    """Sent after the prompt was computed, once the source has said how many."""


@dataclass(slots=True, kw_only=True)
class RemotePrefill:
    """One request at the sink, until it joins the batch, is computed locally, or ends."""

    request: Request
    """Grows by each token emitted: what was emitted is a resume token of the next try."""
    sources: list[WorkerId]
    """Prefill workers not tried yet, best first."""
    coverage: Coverage
    names: list[PrefixHash]
    """Names of the blocks that may be taken from this worker's prefix cache."""
    timeline: Timeline
    reservation: Reservation | None = None
    present: Try | None = None
    is_wanted: bool = True
    """False once the client has left or the request has ended."""

    @property
    def key(self) -> AttemptKey:
        """Request id and attempt."""
        return self.request.request_id, self.request.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and what was emitted."""
        return len(self.request.prompt_token_ids) + len(self.request.resume_token_ids)

    @property
    def needs_kv(self) -> bool:
        """False if the next token is the last one, of every sample."""
        if self.request.forks:
            return True
        return len(self.request.resume_token_ids) + 1 < self.request.sampling.max_tokens

    @property
    def needs_scores(self) -> bool:
        """True if log probabilities of the prompt are wanted and were not emitted yet."""
        return self.request.sampling.num_prompt_logprobs is not None and not self.request.resume_token_ids

    def emit(self, token_ids: tuple[int, ...]) -> None:
        """Count what was emitted."""
        self.request = replace(self.request, resume_token_ids=(*self.request.resume_token_ids, *token_ids))
