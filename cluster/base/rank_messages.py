"""Messages between rank 0 of a worker and its other ranks; in rank 0's own process they are handed over as they are.

    rank → rank 0    JoinGang, RankReady, RankFailed, RankHeartbeat
    rank 0 → rank    FormGang, StartHandoff, RankHeartbeat

Rank 0 holds the channels to other workers and decides; a rank owns its links and copies its own KV (handoff.md, I9).

    both sides of the hand-off
        rank 0 → rank    AddPair, DropPair, LinkRelay (what the peer says about a link of this rank)
        rank → rank 0    LinkRelay (what is to be said to the peer), PairBroken, RankCount, RankState
    source
        rank 0 → rank    DropExport; what to ship comes with the step
        rank → rank 0    StreamUsable, ChunkLeft, ChunkCredited, ChunkUnreadable, StepReleased
    sink
        rank 0 → rank    ExpectTransfer, BindTransfer, UnbindTransfer, PreferBetter
        rank → rank 0    LinkReport, ChunkLanded, ChunkRefused, TransferUnbound, LinkLost, NoLinkLeft

A *pair* is one life of a channel to another worker, by a number of rank 0.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.transfer_messages import (
    Cargo,
    Chunk,
    CloseLink,
    Credit,
    LinkAttached,
    LinkOffer,
    Nack,
    OpenLink,
    TransferId,
)
from pdserve.cluster.base.worker_info import Role

LinkMessage = OpenLink | LinkOffer | LinkAttached | CloseLink | Chunk | Credit | Nack
"""Messages about one link; each names the link's stream, whose ranks it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGang:
    """A rank's process is here."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGang:
    """All ranks are here: load the model, and meet."""

    num_ranks: int
    store: str
    """Endpoint and secret key of the TCPStore over which the ranks' process group meets."""
    steps: str
    """Endpoint and secret key at which rank 0 sends its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank has loaded its part of the model, and follows."""

    notes: tuple[str, ...]
    """Why its part is not in the bitwise class."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """The rank ends with this cause."""

    cause: str
    is_permanent: bool
    """True if another start would end the same way."""
    is_consequence: bool
    """True if another rank's failure is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeartbeat:
    """Sent all the time, both ways."""

    num_steps: int
    """How many steps the rank has done; of rank 0, whose own do not matter, 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartHandoff:
    """Take part in the hand-off of the worker."""

    role: Role
    incarnation: Incarnation


class RankCounter(StrEnum):
    """What ranks count for rank 0's metrics."""

    STALE = "stale"
    FENCES = "fences"
    NACKS = "nacks"
    DEMOTIONS = "demotions"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCount:
    """Something happened once more."""

    counter: RankCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank holds of the hand-off, for gauges and leak checks; sent when it has changed."""

    is_idle: bool
    """No chunk is on its way, waits for a link or has landed; no transfer is known."""
    num_lent_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPair:
    """Another worker has said HELLO, or answered it."""

    pair_no: int
    worker_id: WorkerId
    incarnation: Incarnation
    kv: KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPair:
    """The other worker is gone: fence its links."""

    pair_no: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRelay:
    """A message of or for the other worker."""

    pair_no: int
    message: LinkMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBroken:
    """The other worker broke the protocol: its channel is to be closed."""

    pair_no: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUsable:
    """The source's end of a stream has, or has no longer, a link that new transfers may use."""

    pair_no: int
    stream_no: int
    is_usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """What the link of a stream is now, at its sink; sent when it has changed."""

    pair_no: int
    stream_no: int
    link_no: int
    """0 while there is none."""
    is_usable: bool
    transport: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropExport:
    """Ship nothing more of a transfer."""

    transfer: TransferId
    last_end: int
    """End token of the last step that names it: steps and orders arrive on separate connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLeft:
    """A chunk is on its way; it had waited `stall_s` for a slot. Not `is_first`: it was sent before."""

    transfer: TransferId
    num_bytes: int
    stall_s: float
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCredited:
    """The sink has done with a chunk."""

    transfer: TransferId
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkUnreadable:
    """A chunk could not be gathered: its transfer can never be complete."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReleased:
    """Nothing of what a step has announced of a transfer will be read from its blocks any more."""

    transfer: TransferId
    end_token: int
    """The step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTransfer:
    """Chunks of this transfer may come; they wait for BindTransfer."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class BindTransfer:
    """Scatter the transfer's chunks into these blocks."""

    transfer: TransferId
    pair_no: int
    blocks: tuple[tuple[int, ...], ...]
    """Of each KV group, by logical number."""
    num_tokens: int
    num_cached_tokens: int
    """The first of them, in blocks that other requests may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbindTransfer:
    """Drop the transfer's chunks from now on. Answered by TransferUnbound when no copy is in hand; may be repeated."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferUnbound:
    """This rank does not write the transfer's blocks any more."""

    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferBetter:
    """No transfer uses the pair's links: change to better transports that have rested."""

    pair_no: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLanded:
    """A chunk is verified and in its blocks."""

    stream_no: int
    link_no: int
    seq: int
    num_bytes: int
    cargo: Cargo


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRefused:
    """A chunk could not be verified; one that only failed its checksum comes again."""

    stream_no: int
    cargo: Cargo
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """A link that was in use has broken; the next one is on its way."""

    pair_no: int
    stream_no: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLinkLeft:
    """No transport opens a link now; the first one is tried again after a pause."""

    pair_no: int
    reason: str


HANDOFF_ORDERS = (
    AddPair,
    DropPair,
    LinkRelay,
    DropExport,
    ExpectTransfer,
    BindTransfer,
    UnbindTransfer,
    PreferBetter,
)
HandoffOrder = (
    AddPair | DropPair | LinkRelay | DropExport | ExpectTransfer | BindTransfer | UnbindTransfer | PreferBetter
)
"""What rank 0 tells a rank about the hand-off."""

HandoffReport = (
    LinkRelay
    | PairBroken
    | StreamUsable
    | LinkReport
    | RankCount
    | RankState
    | ChunkLeft
    | ChunkCredited
    | ChunkUnreadable
    | StepReleased
    | TransferUnbound
    | ChunkLanded
    | ChunkRefused
    | LinkLost
    | NoLinkLeft
)
"""What a rank tells rank 0 about it."""

RANK_MESSAGES = (
    JoinGang,
    FormGang,
    RankReady,
    RankFailed,
    RankHeartbeat,
    StartHandoff,
    *HANDOFF_ORDERS,
    PairBroken,
    StreamUsable,
    LinkReport,
    RankCount,
    RankState,
    ChunkLeft,
    ChunkCredited,
    ChunkUnreadable,
    StepReleased,
    TransferUnbound,
    ChunkLanded,
    ChunkRefused,
    LinkLost,
    NoLinkLeft,
)
"""In the order of their codes on the wire."""
RankMessage = JoinGang | FormGang | RankReady | RankFailed | RankHeartbeat | StartHandoff | HandoffOrder | HandoffReport
