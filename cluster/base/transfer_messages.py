"""Messages of the KV hand-off, and who sends them.

    sink → source        Hello, OpenLink, LinkAttached, Prefill, Credit, Nack, Commit
    source → sink        HelloOk, Refuse, LinkOffer, Accept, Reject, Chunk, FirstToken, Final, Progress
    both ways            TransferAbort, CloseLink

The *sink* is the worker that owns the request (it decodes), the *source* computes its KV. A pair has a *stream* for
each pair of ranks that share KV heads (kvtransfer/layout.plan_streams; both sides number them alike), and a link for
each stream. Chunk headers travel in order with their bytes: on the data connection (tcp), as the write's notification
(nixl), or here: once the copy is in shared memory (shm), or before the sink receives (torch_dist).
"""

from dataclasses import dataclass

from pdserve.cluster.base.ids import Incarnation, RequestId, WorkerId
from pdserve.cluster.base.kv_layout import ChunkRange, KVLayout
from pdserve.cluster.base.request import Request, TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferId:
    """One try to fetch a request's KV. `attempt` is the ingress's, `transfer_no` the sink's."""

    request_id: RequestId
    attempt: int
    transfer_no: int
    source: Incarnation
    sink: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who the sink is, and what its KV looks like. Answered by HelloOk or Refuse."""

    worker_id: WorkerId
    incarnation: Incarnation
    kv: KVLayout
    numerics_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloOk:
    """The source's KV fits."""

    worker_id: WorkerId
    incarnation: Incarnation
    kv: KVLayout
    numerics_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The pair does not fit; names the field that differs, with both values."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLink:
    """The sink wants a link for a stream over this transport. Answered by LinkOffer or CloseLink.

    `link_no` is the sink's, of all its links; as in every message about a link, `stream_no` says whose rank it is.
    """

    link_no: int
    stream_no: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOffer:
    """Where the sink attaches. `address` is the transport's own text."""

    link_no: int
    stream_no: int
    address: str
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAttached:
    """The sink has attached: the source may send its test pattern. `answer` is the transport's own text."""

    link_no: int
    stream_no: int
    answer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLink:
    """The link is over, or never came to be."""

    link_no: int
    stream_no: int
    reason: str
    is_temporary: bool = False
    """There is no room for a link now: nothing is wrong with its transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Compute the KV of prompt and resume tokens, sample one token, ship what the sink does not hold.

    Without `needs_kv` nothing is shipped: the first token is the last. `deadline_s` is a duration.
    """

    transfer: TransferId
    request: Request
    num_tokens_held: int
    needs_kv: bool
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """The prefill waits behind `position` others; sent again with 0 when computing starts."""

    transfer: TransferId
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The source does not take the prefill."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """What a chunk brings to a transfer."""

    transfer: TransferId
    chunk_no: int
    """Counts the transfer's chunks in its stream: what comes twice, after a fail-over, is counted once."""
    range: ChunkRange
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Header of one chunk of a stream."""

    link_no: int
    stream_no: int
    seq: int
    """Counts what the link carries, from 0 without a gap."""
    slot: int
    num_bytes: int
    cargo: Cargo | None
    """None: the link's test pattern."""
    num_resends: int
    is_void: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The sink has done with the chunk: its slot is the source's again."""

    link_no: int
    stream_no: int
    seq: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """The sink could not verify the chunk; the source sends it again from the slot it still holds."""

    link_no: int
    stream_no: int
    seq: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The token sampled after prefill, as soon as it is known; its request id and attempt are the source's own."""

    transfer: TransferId
    token: TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Everything was sent: how many chunks in each stream, and what the source measured (durations)."""

    transfer: TransferId
    num_chunks: tuple[int, ...]
    num_bytes: int
    early_bytes: int
    """Bytes credited before prefill ended."""
    queue_s: float
    prefill_s: float
    stall_s: float
    """Time in which a chunk was ready and no slot was free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The sink holds everything it needs; the source forgets the transfer."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAbort:
    """The transfer is over; nothing further of it is wanted."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProgress:
    """Where a transfer is: queue position, tokens computed, chunks sent."""

    transfer: TransferId
    position: int
    num_computed_tokens: int
    num_sent_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Each second: every transfer of this sink, and what the source's engine has done (a counter) and expects."""

    transfers: tuple[TransferProgress, ...]
    num_engine_tokens: int
    predicted_step_s: float
