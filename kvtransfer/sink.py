"""A transfer at its sink: events in, instructions out. Pure.

    OFFERED ──started──▶ RECEIVING ──counts met, verified──▶ COMPLETE ──commit posted──▶ COMMITTED
       │                     │
       │                     └─ failed, aborted, ended by its first token ─▶ UNBINDING ──unbound──▶ FAILED or COMMITTED
       └─ rejected, failed, aborted ─▶ FAILED

The first terminal event wins. Complete means that the chunks received equal FINAL's count, zero counted, and that they
cover every token of every head and layer (I8). They are counted for each stream, by their numbers: what comes twice,
after a fail-over, counts once. Blocks are given back only after UNBIND was answered: nobody writes them then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.base.kv_layout import ChunkRange
from pdserve.cluster.base.request import TokenDelta
from pdserve.kvtransfer.layout import Coverage, Stream
from pdserve.kvtransfer.table import Machine, Table


class SinkState(StrEnum):
    """Where a transfer is at its sink."""

    OFFERED = "offered"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    UNBINDING = "unbinding"
    COMMITTED = "committed"
    FAILED = "failed"


class SinkEvent(StrEnum):
    """What can happen to it."""

    STARTED = "started"
    CHUNK_VERIFIED = "chunk verified"
    FIRST_TOKEN = "first token"
    FINAL = "final"
    COUNTS_MET = "counts met"
    COMMIT_POSTED = "commit posted"
    ENDED = "ended by its first token"
    FAILED = "failed"
    UNBOUND = "unbound"
    UNBOUND_ENDED = "unbound, ended"


_S, _E = SinkState, SinkEvent

SINK_TABLE: Table[SinkState, SinkEvent] = {
    (_S.OFFERED, _E.STARTED): _S.RECEIVING,
    (_S.OFFERED, _E.FAILED): _S.FAILED,
    (_S.RECEIVING, _E.STARTED): _S.RECEIVING,
    (_S.RECEIVING, _E.CHUNK_VERIFIED): _S.RECEIVING,
    (_S.RECEIVING, _E.FIRST_TOKEN): _S.RECEIVING,
    (_S.RECEIVING, _E.FINAL): _S.RECEIVING,
    (_S.RECEIVING, _E.COUNTS_MET): _S.COMPLETE,
    (_S.RECEIVING, _E.ENDED): _S.UNBINDING,
    (_S.RECEIVING, _E.FAILED): _S.UNBINDING,
    (_S.COMPLETE, _E.COMMIT_POSTED): _S.COMMITTED,
    (_S.COMPLETE, _E.FAILED): _S.UNBINDING,
    (_S.UNBINDING, _E.CHUNK_VERIFIED): _S.UNBINDING,
    (_S.UNBINDING, _E.FIRST_TOKEN): _S.UNBINDING,
    (_S.UNBINDING, _E.FINAL): _S.UNBINDING,
    (_S.UNBINDING, _E.STARTED): _S.UNBINDING,
    (_S.UNBINDING, _E.FAILED): _S.UNBINDING,
    (_S.UNBINDING, _E.UNBOUND): _S.FAILED,
    (_S.UNBINDING, _E.UNBOUND_ENDED): _S.COMMITTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BindBlocks:
    """Give the transfer its blocks: chunks may be scattered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitFirstToken:
    """The request has a new token."""

    token: TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class PostCommit:
    """Tell the source to forget the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostAbort:
    """Tell the source that it is over."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBatch:
    """The KV is complete: the sequence decodes from the next step on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbind:
    """Take the blocks away from the landing thread; answered by `unbound`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnded:
    """The transfer ended without a batch to join: by its first token (no cause), or by failure."""

    cause: str | None


SinkInstruction = BindBlocks | EmitFirstToken | PostCommit | PostAbort | JoinBatch | Unbind | TransferEnded


class SinkTransfer:
    """Counts chunks, knows what is covered, and decides what the shell does next."""

    def __init__(self, coverage: Coverage, num_tokens: int, streams: Sequence[Stream], *, needs_kv: bool) -> None:
        self._machine = Machine(SINK_TABLE, SinkState.OFFERED, terminal=(_S.COMMITTED, _S.FAILED))
        self.coverage = coverage
        self._num_tokens = num_tokens
        self._needs_kv = needs_kv
        self._streams = streams
        self._verified: list[set[int]] = [set() for _ in streams]
        self._num_chunks: tuple[int, ...] | None = None
        self._has_token = False
        self._cause: str | None = None

    @property
    def state(self) -> SinkState:
        """Where it is."""
        return self._machine.state

    @property
    def has_ended(self) -> bool:
        """True in a terminal state."""
        return self._machine.has_ended

    @property
    def history(self) -> str:
        """How it came there."""
        return " ".join(self._machine.history)

    def started(self) -> list[SinkInstruction]:
        """The source computes (position 0)."""
        is_first = self.state is _S.OFFERED
        self._machine.apply(_E.STARTED)
        return [BindBlocks()] if is_first and self._needs_kv else []

    def chunk_verified(self, stream_no: int, chunk_no: int, chunk: ChunkRange) -> list[SinkInstruction]:
        """A chunk was scattered and its checksum holds (I12)."""
        if not self._machine.apply(_E.CHUNK_VERIFIED):
            return []
        self._verified[stream_no].add(chunk_no)
        self.coverage.add(self._streams[stream_no].sink_rank, chunk)
        return self._complete()

    def chunk_damaged(self, stream_no: int, chunk_no: int) -> None:
        """A damaged body was copied to where a chunk belongs, which may have been verified before: it comes again."""
        self._verified[stream_no].discard(chunk_no)

    def first_token(self, token: TokenDelta) -> list[SinkInstruction]:
        """The source sampled the token after the prompt; the first one counts."""
        if self._has_token or not self._machine.apply(_E.FIRST_TOKEN) or self.state is _S.UNBINDING:
            return []
        self._has_token = True
        emit = EmitFirstToken(token=token)
        if token.finish_reason is not None:
            self._machine.apply(_E.ENDED)
            return [emit, PostCommit(), Unbind()]
        return [emit, *self._complete()]

    def final(self, num_chunks: tuple[int, ...]) -> list[SinkInstruction]:
        """The source has sent everything: so many chunks in each stream."""
        if not self._machine.apply(_E.FINAL):
            return []
        self._num_chunks = num_chunks
        return self._complete()

    def failed(self, cause: str, *, tell_source: bool) -> list[SinkInstruction]:
        """The source rejected or aborted it, the link or the deadline ended it, or the client left."""
        if self.state is _S.UNBINDING or not self._machine.apply(_E.FAILED):
            return []
        self._cause = cause
        abort: list[SinkInstruction] = [PostAbort(reason=cause)] if tell_source else []
        return [*abort, TransferEnded(cause=cause)] if self.has_ended else [*abort, Unbind()]

    def unbound(self) -> list[SinkInstruction]:
        """Nobody writes the blocks any more."""
        event = _E.UNBOUND if self._cause is not None else _E.UNBOUND_ENDED
        return [TransferEnded(cause=self._cause)] if self._machine.apply(event) else []

    def _complete(self) -> list[SinkInstruction]:
        is_counted = self._has_token and tuple(map(len, self._verified)) == self._num_chunks
        if self.state is not _S.RECEIVING or not is_counted:
            return []
        if not self.coverage.is_complete(self._num_tokens):
            return self.failed("the chunks do not cover the prompt", tell_source=True)
        self._machine.apply(_E.COUNTS_MET)
        self._machine.apply(_E.COMMIT_POSTED)
        return [PostCommit(), JoinBatch()]
