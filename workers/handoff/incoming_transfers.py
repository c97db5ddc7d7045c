"""The transfers of a worker's sink end: messages of sources, chunks of ranks and deadlines in, instructions out.

Runs on the worker's loop. What a transfer does is decided by SinkTransfer; here are the channels, the landing threads
and the clock around it. What becomes of the request is its owner's business.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.rank_messages import (
    BindTransfer,
    ChunkLanded,
    ChunkRefused,
    ExpectTransfer,
    HandoffReport,
    LinkLost,
    LinkRelay,
    LinkReport,
    NoLinkLeft,
    RankCount,
    RankState,
    TransferUnbound,
    UnbindTransfer,
)
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.transfer_messages import (
    Accept,
    Commit,
    Final,
    FirstToken,
    Prefill,
    Progress,
    Reject,
    TransferAbort,
    TransferId,
)
from pdserve.kvtransfer.landing import CHECKSUM, SCATTER_FAILED
from pdserve.kvtransfer.reaper import Reaper
from pdserve.kvtransfer.sink import (
    BindBlocks,
    EmitFirstToken,
    JoinBatch,
    PostAbort,
    PostCommit,
    SinkInstruction,
    SinkState,
    SinkTransfer,
    Unbind,
)
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.handoff.remote_prefill import RemotePrefill, Try
from pdserve.workers.handoff.settings import MAX_FAILOVERS, TICK_S, HandoffSettings, RankPort
from pdserve.workers.handoff.source_peer import SourcePeer
from pdserve.workers.handoff.source_peers import SourcePeers

logger = logging.getLogger(__name__)


class TransferOwner(Protocol):
    """The sink service: what becomes of the requests."""

    def has_tokens(self, token_ids: tuple[int, ...]) -> bool:
        """True if the model has these tokens. For ids that came from a peer."""

    def starts(self, prefill: RemotePrefill) -> None:
        """The source computes: redeem the promise of blocks."""

    def emit(self, prefill: RemotePrefill, token: TokenDelta) -> None:
        """The first token was sampled."""

    def complete(self, prefill: RemotePrefill, num_tokens: int) -> None:
        """The KV of `num_tokens` is verified: the request joins the batch."""

    def ended(self, prefill: RemotePrefill, source: SourcePeer, cause: str | None) -> None:
        """The transfer is over, and nothing of it is bound: by its first token (no cause), or by failure."""


class IncomingTransfers:
    """Every transfer to this worker.

    Attributes:
        peers: the prefill workers that can be asked.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        owner: TransferOwner,
        metrics: TransferMetrics,
        ranks: Sequence[RankPort],
    ) -> None:
        """`ranks` are the worker's, in order."""
        self.peers = SourcePeers(settings, ranks, self)
        self._ranks = ranks
        self._unanswered: dict[TransferId, int] = {}
        self._settings = settings
        self._owner = owner
        self._metrics = metrics
        self._transfers: dict[TransferId, RemotePrefill] = {}
        self._reaper: Reaper[TransferId] = Reaper(settings.clock)
        self._numbers = count(1)
        self._tasks = BackgroundTasks("the sink")
        self._watcher: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    async def start(self) -> None:
        """Begin to watch deadlines."""
        self._watcher = self._tasks.start(self._watch(), name="sink deadlines")

    async def stop(self) -> None:
        """Disconnect from every source."""
        await self.peers.stop()
        if self._watcher is not None:
            self._watcher.cancel()
        await self._tasks.wait()

    @property
    def is_idle(self) -> bool:
        """True if no transfer, binding, deadline or occupied slot is left (I16)."""
        is_empty = not self._transfers and not len(self._reaper) and not self._unanswered
        return is_empty and all(rank.is_idle for rank in self._ranks)

    @property
    def oldest_s(self) -> float:
        """Seconds since the least recent progress of a transfer."""
        return self._reaper.oldest_s

    def num_of(self, peer: SourcePeer) -> int:
        """Return how many transfers a source has now."""
        return len(self._of(peer))

    def begin(self, prefill: RemotePrefill, peer: SourcePeer) -> None:
        """Ask a source whose links are open for the KV of a request."""
        settings, request = self._settings, prefill.request
        transfer = TransferId(
            request_id=request.request_id,
            attempt=request.attempt,
            transfer_no=next(self._numbers),
            source=peer.info.incarnation,
            sink=settings.incarnation,
        )
        prefill.present = Try(
            transfer=transfer,
            peer=peer,
            machine=SinkTransfer(prefill.coverage, prefill.num_tokens, peer.streams, needs_kv=prefill.needs_kv),
            num_tokens=prefill.num_tokens,
            limit_s=settings.config.queued_timeout_s,
            posted_time=settings.clock.now(),
        )
        self._transfers[transfer] = prefill
        for rank in self._ranks:
            rank.post(ExpectTransfer(transfer=transfer))
        self._reaper.watch(transfer, settings.config.queued_timeout_s)
        num_held = prefill.coverage.num_held(prefill.num_tokens) if prefill.needs_kv else 0
        held = f", {num_held} tokens held" if num_held else ""
        prefill.timeline.mark(f"asked {peer.info.worker_id} over {peer.transports}{held}")
        peer.post(
            Prefill(
                transfer=transfer,
                request=request,
                num_tokens_held=num_held,
                needs_kv=prefill.needs_kv,
                deadline_s=settings.config.deadline_s,
            )
        )

    def fail(self, prefill: RemotePrefill, cause: str) -> None:
        """End the present transfer of a request; its source is told."""
        assert prefill.present is not None, "nothing is on its way"
        self._execute(prefill, prefill.present.machine.failed(cause, tell_source=True))

    def _link_lost(self, peer: SourcePeer, stream_no: int, reason: str) -> None:
        """Transfers go on over the next link, but not for ever."""
        for prefill in self._of(peer):
            present = prefill.present
            if present is None or present.machine.state is SinkState.UNBINDING:
                continue
            losses = present.link_losses.get(stream_no, 0) + 1
            present.link_losses[stream_no] = losses
            if losses > MAX_FAILOVERS:
                self._execute(prefill, present.machine.failed(reason, tell_source=True))
                continue
            prefill.timeline.mark(f"link lost: {reason}; goes on over the next one")
            self._reaper.watch(present.transfer, present.limit_s, ("link lost", stream_no, losses))
            self._metrics.failovers.inc()

    def peer_lost(self, peer: SourcePeer, reason: str) -> None:
        """See PeerEvents: every transfer of the source ends."""
        for prefill in self._of(peer):
            self.fail(prefill, reason)

    def _of(self, peer: SourcePeer) -> list[RemotePrefill]:
        transfers = self._transfers.values()
        return [prefill for prefill in transfers if prefill.present is not None and prefill.present.peer is peer]

    # Messages of sources.

    def transfer_message(self, peer: SourcePeer, message: Message) -> None:
        """See PeerEvents."""
        if not isinstance(message, Progress) and not self._is_from(peer, message):
            self._metrics.stale.inc()
            return
        match message:
            case Accept(transfer=transfer, position=position):
                self._accepted(transfer, position)
            case Reject(transfer=transfer, reason=reason):
                self._with(transfer, lambda present: present.machine.failed(f"rejected: {reason}", tell_source=False))
            case FirstToken(transfer=transfer, token=token):
                # An error has no token.
                if len(token.token_ids) != (token.finish_reason is not FinishReason.ERROR):
                    raise ProtocolError(f"{len(token.token_ids)} first tokens")
                if not self._owner.has_tokens(token.token_ids):
                    raise ProtocolError(f"token {token.token_ids} is none of the model's")
                self._with(transfer, lambda present: present.machine.first_token(token))
            case Final(transfer=transfer):
                self._finalised(message)
            case TransferAbort(transfer=transfer, reason=reason):
                self._with(transfer, lambda present: present.machine.failed(reason, tell_source=False))
            case Progress():
                self._progressed(peer, message)

    def _is_from(self, peer: SourcePeer, message: Message) -> bool:
        """True if the message is about a transfer that this peer serves now. Raises ProtocolError for other kinds."""
        if not isinstance(message, Accept | Reject | FirstToken | Final | TransferAbort):
            raise ProtocolError(f"unexpected {type(message).__name__} from a source")
        prefill = self._transfers.get(message.transfer)
        return prefill is not None and prefill.present is not None and prefill.present.peer is peer

    def _accepted(self, transfer: TransferId, position: int) -> None:
        prefill = self._find(transfer)
        if prefill is None or prefill.present is None:
            return
        if position:
            prefill.timeline.mark(f"queued behind {position}")
            self._reaper.watch(transfer, prefill.present.limit_s, position)
            return
        prefill.timeline.mark("prefill starts")
        prefill.present.limit_s = self._settings.config.streaming_timeout_s
        self._reaper.watch(transfer, prefill.present.limit_s)
        self._execute(prefill, prefill.present.machine.started())

    def _finalised(self, message: Final) -> None:
        prefill = self._find(message.transfer)
        if prefill is None or prefill.present is None:
            return
        if len(message.num_chunks) != len(prefill.present.peer.streams) or min(message.num_chunks) < 0:
            raise ProtocolError(f"FINAL counts {message.num_chunks}")
        metrics = self._metrics
        metrics.queue.observe(message.queue_s)
        metrics.credit_stall.observe(message.stall_s)
        prefill.present.num_late_bytes = message.num_bytes - message.early_bytes
        if message.num_bytes:
            metrics.early_share.observe(message.early_bytes / message.num_bytes)
        prefill.timeline.mark(
            f"all sent: {sum(message.num_chunks)} chunks, {message.num_bytes / 1e6:.2f} MB, "
            f"{message.early_bytes / max(1, message.num_bytes):.0%} before prefill ended; at the source "
            f"{message.queue_s * 1000:.1f} ms queued, {message.prefill_s * 1000:.1f} ms prefill, "
            f"{message.stall_s * 1000:.1f} ms waiting for slots"
        )
        self._execute(prefill, prefill.present.machine.final(message.num_chunks))

    def _progressed(self, peer: SourcePeer, message: Progress) -> None:
        config = self._settings.config
        for item in message.transfers:
            prefill = self._transfers.get(item.transfer)
            if prefill is None or prefill.present is None or prefill.present.peer is not peer:
                continue
            if prefill.present.machine.state is SinkState.UNBINDING:
                continue
            if prefill.present.machine.state is SinkState.OFFERED:
                # A queue that does not move is no trouble while the source's engine works on what is ahead.
                mark: tuple[int, ...] = (item.position, message.num_engine_tokens)
                limit_s = config.queued_timeout_s
            else:
                # Once the token is here the source's engine has nothing more to do for it: only chunks are progress.
                num_engine_tokens = 0 if prefill.present.token_time is not None else message.num_engine_tokens
                mark = (item.num_computed_tokens, item.num_sent_chunks, num_engine_tokens)
                limit_s = config.streaming_timeout_s
            limit_s = min(max(limit_s, 2 * message.predicted_step_s), config.deadline_s)
            prefill.present.limit_s = limit_s
            self._reaper.watch(item.transfer, limit_s, mark)

    def _execute(self, prefill: RemotePrefill, instructions: list[SinkInstruction]) -> None:
        for instruction in instructions:
            self._execute_one(prefill, instruction)

    def _execute_one(self, prefill: RemotePrefill, instruction: SinkInstruction) -> None:
        present = prefill.present
        assert present is not None, "instructions belong to a transfer"
        match instruction:
            case BindBlocks():
                assert prefill.reservation is not None, "a transfer of KV has its reservation"
                self._owner.starts(prefill)
                self._bind(prefill.reservation, present)
            case EmitFirstToken(token=token):
                present.token_time = self._settings.clock.now()
                prefill.timeline.mark("first token")
                self._owner.emit(prefill, token)
            case PostCommit():
                present.peer.post(Commit(transfer=present.transfer))
            case PostAbort(reason=reason_text):
                present.peer.post(TransferAbort(transfer=present.transfer, reason=reason_text))
            case Unbind():
                self._unbind(present.transfer)
            case JoinBatch():
                self._complete(prefill, present)
            case _:
                self._close(prefill, present)
                self._owner.ended(prefill, present.peer, instruction.cause)

    def _bind(self, reservation: Reservation, present: Try) -> None:
        order = BindTransfer(
            transfer=present.transfer,
            pair_no=present.peer.pair_no,
            blocks=tuple(tuple(blocks) for blocks in reservation.blocks),
            num_tokens=present.num_tokens,
            num_cached_tokens=reservation.num_cached_blocks * self._settings.layout.block_size,
        )
        for rank in self._ranks:
            rank.post(order)

    def _unbind(self, transfer: TransferId) -> None:
        """Drop the transfer's chunks from now on, on every rank; each answers. May be repeated."""
        self._unanswered[transfer] = self._unanswered.get(transfer, 0) + len(self._ranks)
        for rank in self._ranks:
            rank.post(UnbindTransfer(transfer=transfer))

    def _complete(self, prefill: RemotePrefill, present: Try) -> None:
        self._close(prefill, present)
        now = self._settings.clock.now()
        if present.last_chunk_time is not None:
            since_ms = (now - present.last_chunk_time) * 1000
            prefill.timeline.mark(f"all verified (last chunk {since_ms:.1f} ms ago), committed, joins the batch")
        if present.token_time is not None:
            self._metrics.commit.observe(now - present.token_time)
            if present.num_late_bytes is not None:
                present.peer.observe_tail(present.num_late_bytes, now - present.token_time)
        self._owner.complete(prefill, present.num_tokens)

    def _close(self, prefill: RemotePrefill, present: Try) -> None:
        # No copy is in hand: every chunk was scattered, or UNBIND was answered, or nothing was ever bound.
        self._unbind(present.transfer)
        del self._transfers[present.transfer]
        prefill.present = None
        self._reaper.forget(present.transfer)
        metrics = self._metrics
        metrics.received.labels(present.machine.state.value).inc()
        if present.first_chunk_time is not None and present.last_chunk_time is not None:
            metrics.first_chunk.observe(present.first_chunk_time - present.posted_time)
            metrics.last_chunk.observe(present.last_chunk_time - present.posted_time)
            duration_s = present.last_chunk_time - present.first_chunk_time
            if duration_s > 0:
                metrics.rate.observe(present.num_bytes / duration_s / 1e9)

    def _find(self, transfer: TransferId) -> RemotePrefill | None:
        prefill = self._transfers.get(transfer)
        if prefill is None:
            self._metrics.stale.inc()
        return prefill

    def _with(self, transfer: TransferId, act: "_Act") -> None:
        prefill = self._find(transfer)
        if prefill is not None and prefill.present is not None:
            self._execute(prefill, act(prefill.present))

    # From the ranks.

    def reported(self, report: HandoffReport) -> None:
        """A rank reports; on the loop."""
        match report:
            case LinkRelay(pair_no=pair_no, message=message):
                peer = self.peers.of_pair(pair_no)
                if peer is not None:
                    peer.post(message)
            case LinkReport(pair_no=pair_no):
                peer = self.peers.of_pair(pair_no)
                if peer is not None:
                    peer.link_reported(report)
            case LinkLost(pair_no=pair_no, stream_no=stream_no, reason=reason):
                peer = self.peers.of_pair(pair_no)
                if peer is not None:
                    self._link_lost(peer, stream_no, reason)
            case NoLinkLeft(pair_no=pair_no, reason=reason):
                peer = self.peers.of_pair(pair_no)
                if peer is not None:
                    self.peer_lost(peer, f"no link to {peer.info.worker_id}: {reason}")
            case ChunkLanded():
                self._chunk_landed(report)
            case ChunkRefused():
                self._chunk_refused(report)
            case TransferUnbound(transfer=transfer):
                self._unbound(transfer)
            case RankCount(counter=counter):
                self._metrics.count(counter)
            case RankState():
                return  # of a rank of this process, which is asked itself
            case _:
                raise ProtocolError(f"{type(report).__name__} is no report of a sink's rank")

    def _chunk_landed(self, report: ChunkLanded) -> None:
        """A chunk is verified and in its blocks."""
        cargo = report.cargo
        prefill = self._find(cargo.transfer)
        if prefill is None or prefill.present is None:
            return
        present, now = prefill.present, self._settings.clock.now()
        if present.first_chunk_time is None:
            present.first_chunk_time = now
            prefill.timeline.mark("first chunk")
        present.last_chunk_time = now
        present.num_bytes += report.num_bytes
        present.peer.count_bytes(report.link_no, report.num_bytes)
        self._metrics.received_bytes.inc(report.num_bytes)
        self._reaper.watch(cargo.transfer, present.limit_s, ("chunk", report.link_no, report.seq))
        self._execute(prefill, present.machine.chunk_verified(report.stream_no, cargo.chunk_no, cargo.range))

    def _chunk_refused(self, report: ChunkRefused) -> None:
        """A chunk that failed its checksum is sent again; one that does not belong ends its transfer."""
        cargo, reason, stream_no = report.cargo, report.reason, report.stream_no
        prefill = self._transfers.get(cargo.transfer)
        if prefill is not None and prefill.present is not None and reason in (CHECKSUM, SCATTER_FAILED):
            # What an earlier chunk or try had verified there may be overwritten now.
            prefill.coverage.remove(prefill.present.peer.streams[stream_no].sink_rank, cargo.range)
            prefill.present.machine.chunk_damaged(stream_no, cargo.chunk_no)
        if reason == CHECKSUM:
            self._metrics.checksum_failures.inc()
        else:
            self._with(cargo.transfer, lambda present: present.machine.failed(reason, tell_source=True))

    def _unbound(self, transfer: TransferId) -> None:
        """A rank has answered; with the last answer nothing writes the transfer's blocks any more."""
        self._unanswered[transfer] -= 1
        if self._unanswered[transfer]:
            return
        del self._unanswered[transfer]
        prefill = self._transfers.get(transfer)
        if prefill is not None and prefill.present is not None:
            self._execute(prefill, prefill.present.machine.unbound())

    # Deadlines.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            # One check that fails does not cost the others (I6).
            for transfer, limit_s in self._reaper.overdue():
                self._tasks.guarded(self._fail_overdue, transfer, limit_s)
            for peer in self.peers.all():
                if not self._of(peer):
                    self._tasks.guarded(peer.prefer_better)

    def _fail_overdue(self, transfer: TransferId, limit_s: float) -> None:
        cause = f"no progress for {limit_s:.1f} s"
        self._with(transfer, lambda present: present.machine.failed(cause, tell_source=True))


class _Act(Protocol):
    def __call__(self, present: Try) -> list[SinkInstruction]:
        """Apply an event to a transfer's machine."""
