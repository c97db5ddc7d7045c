"""A transfer at its source: events in, instructions out. Pure.

    QUEUED ──started──▶ RUNNING ⇄ STREAMING (chunks are on their way) ──all sent──▶ SENT ──commit──▶ COMMITTED
       └───────────────────┴──────────┴──────────── aborted, failed, sink gone ──────┴────▶ FAILED

The first terminal event wins. FINAL goes out once, when the first token is known and every chunk has been sent; a sink
that has its ending with the first token commits early, and what is unsent is dropped.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.base.request import TokenDelta
from pdserve.kvtransfer.table import Machine, Table


class SourceState(StrEnum):
    """Where a transfer is at its source."""

    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    SENT = "sent"
    COMMITTED = "committed"
    FAILED = "failed"


class SourceEvent(StrEnum):
    """What can happen to it."""

    STARTED = "started"
    CHUNK_SENT = "chunk sent"
    ALL_CREDITED = "all credited"
    ALL_SENT = "all sent"
    COMMITTED = "committed"
    FAILED = "failed"


_S, _E = SourceState, SourceEvent
_ALIVE = (_S.QUEUED, _S.RUNNING, _S.STREAMING, _S.SENT)

SOURCE_TABLE: Table[SourceState, SourceEvent] = {
    **{(state, _E.FAILED): _S.FAILED for state in _ALIVE},
    **{(state, _E.COMMITTED): _S.COMMITTED for state in _ALIVE if state is not _S.QUEUED},
    (_S.QUEUED, _E.STARTED): _S.RUNNING,
    (_S.RUNNING, _E.CHUNK_SENT): _S.STREAMING,
    (_S.STREAMING, _E.CHUNK_SENT): _S.STREAMING,
    (_S.STREAMING, _E.ALL_CREDITED): _S.RUNNING,
    (_S.RUNNING, _E.ALL_SENT): _S.SENT,
    (_S.STREAMING, _E.ALL_SENT): _S.SENT,
    # Resends, and the credits of the last chunks.
    (_S.SENT, _E.CHUNK_SENT): _S.SENT,
    (_S.SENT, _E.ALL_CREDITED): _S.SENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFirstToken:
    """Tell the sink its token."""

    token: TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFinal:
    """Tell the sink that every chunk has been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAbort:
    """Tell the sink that it is over."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWork:
    """Stop computing and gathering for this transfer, and forget it."""


SourceInstruction = SendFirstToken | SendFinal | SendAbort | StopWork


class SourceTransfer:
    """Counts chunks and decides what the shell does next."""

    def __init__(self) -> None:
        self._machine = Machine(SOURCE_TABLE, SourceState.QUEUED, terminal=(_S.COMMITTED, _S.FAILED))
        self.num_sent = 0
        self.num_credited = 0
        self._num_chunks: int | None = None
        self._sent_final = False

    @property
    def state(self) -> SourceState:
        """Where it is."""
        return self._machine.state

    @property
    def history(self) -> str:
        """How it came there."""
        return " ".join(self._machine.history)

    def started(self) -> list[SourceInstruction]:
        """The engine computes it."""
        self._machine.apply(_E.STARTED)
        return []

    def chunk_sent(self, *, is_first: bool) -> list[SourceInstruction]:
        """A chunk is on its way; not `is_first`: once more."""
        if self._machine.apply(_E.CHUNK_SENT) and is_first:
            self.num_sent += 1
        return self._finish_sending()

    def chunk_credited(self) -> list[SourceInstruction]:
        """The sink has scattered a chunk."""
        self.num_credited += 1
        if self.num_credited == self.num_sent and self.state is _S.STREAMING:
            self._machine.apply(_E.ALL_CREDITED)
        return []

    def prefilled(self, token: TokenDelta, num_chunks: int) -> list[SourceInstruction]:
        """The prompt is computed and a token sampled; `num_chunks` were made ready in all."""
        if self._machine.has_ended:
            return []
        self._num_chunks = num_chunks
        first = SendFirstToken(token=token)
        return [first, *self._finish_sending()]

    def committed(self) -> list[SourceInstruction]:
        """The sink needs nothing more."""
        return [StopWork()] if self._machine.apply(_E.COMMITTED) else []

    def aborted(self) -> list[SourceInstruction]:
        """The sink gave up or is gone, or the engine refused the request."""
        return [StopWork()] if self._machine.apply(_E.FAILED) else []

    def failed(self, reason: str) -> list[SourceInstruction]:
        """Something here failed: the engine, gathering a chunk, or the deadline. The sink learns it (I5, I11)."""
        return [SendAbort(reason=reason), StopWork()] if self._machine.apply(_E.FAILED) else []

    def _finish_sending(self) -> list[SourceInstruction]:
        if self._machine.has_ended or self._sent_final or self.num_sent != self._num_chunks:
            return []
        self._sent_final = True
        self._machine.apply(_E.ALL_SENT)
        return [SendFinal()]
