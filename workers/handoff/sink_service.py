"""The sink side of a worker: has prefill workers compute prompts, lands their KV, and joins the requests to the batch.

Runs on the worker's loop; the worker owns the request and is told its first token. Each request reserves room before a
prefill worker is asked, so what arrives always has its place. If a try fails, the next prefill worker of the route is
asked for what is missing; after the last one the engine computes the rest itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from itertools import count
from typing import Protocol

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import AttemptKey, WorkerId
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta
from pdserve.cluster.base.tasks import BackgroundTasks
from pdserve.cluster.base.timeline import Timeline
from pdserve.cluster.base.transfer_messages import (
    Accept,
    Cargo,
    Chunk,
    Commit,
    Final,
    FirstToken,
    Prefill,
    Progress,
    Reject,
    TransferAbort,
    TransferId,
)
from pdserve.cluster.base.worker_info import LinkView, WorkerInfo
from pdserve.kvtransfer.landing import CHECKSUM, SCATTER_FAILED
from pdserve.kvtransfer.layout import Coverage
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
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.handoff.block_target import BlockTarget
from pdserve.workers.handoff.remote_prefill import RemotePrefill, Try
from pdserve.workers.handoff.settings import MAX_FAILOVERS, TICK_S, HandoffSettings
from pdserve.workers.handoff.source_peer import SourcePeer
from pdserve.workers.handoff.source_peers import SourcePeers

logger = logging.getLogger(__name__)


class Offer(StrEnum):
    """What became of a request offered to the sink service."""

    TAKEN = "taken"
    BUSY = "busy"
    LOCAL = "local"


class RequestOwner(Protocol):
    """The worker that owns the requests."""

    def join(self, request: Request, reservation: Reservation, num_computed_tokens: int) -> None:
        """Run a request whose first tokens have their KV in the reservation's blocks."""

    def submit(self, request: Request) -> None:
        """Run a request from its beginning."""

    def emit(self, request: Request, token: TokenDelta) -> None:
        """The request, as it was before, has a new token, and perhaps its ending. The token's ids are the source's."""


class SinkService:
    """Made for every worker of the decode role."""

    def __init__(
        self, engine: Engine, owner: RequestOwner, settings: HandoffSettings, metrics: TransferMetrics, max_waiting: int
    ) -> None:
        self._scheduler = engine.scheduler
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._settings = settings
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._peers = SourcePeers(settings, self, self, metrics)
        self._prefills: dict[AttemptKey, RemotePrefill] = {}
        self._transfers: dict[TransferId, RemotePrefill] = {}
        self._waiting: deque[RemotePrefill] = deque()
        self._reaper: Reaper[TransferId] = Reaper(settings.clock)
        self._transfer_numbers = count(1)
        self._tasks = BackgroundTasks("the sink")
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to land chunks and to watch deadlines."""
        self._peers.start()
        self._watcher = self._tasks.start(self._watch(), name="sink deadlines")

    async def stop(self) -> None:
        """Disconnect from every source."""
        await self._peers.stop()
        if self._watcher is not None:
            self._watcher.cancel()
        await self._tasks.wait()

    @property
    def num_receiving(self) -> int:
        """Requests that are not in the engine yet."""
        return len(self._prefills)

    @property
    def is_idle(self) -> bool:
        """True if no request, binding, deadline or occupied slot is left (I16)."""
        is_empty = not (self._prefills or self._transfers or self._waiting or len(self._reaper))
        return is_empty and self._peers.is_idle

    def links(self) -> tuple[LinkView, ...]:
        """Return every link, for status."""
        counts: dict[int, int] = {}
        for prefill in self._transfers.values():
            if prefill.present is not None:
                counts[id(prefill.present.peer)] = counts.get(id(prefill.present.peer), 0) + 1
        return tuple(view for peer in self._peers.all() for view in peer.views(counts.get(id(peer), 0)))

    def refresh_gauges(self) -> None:
        """Set the gauges of the sink side."""
        self._metrics.receiving.set(len(self._transfers))
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.oldest.set(self._reaper.oldest_s)
        self._metrics.links.set(sum(link.state == "open" for link in self.links()))

    # Prefill workers.

    def announce(self, workers: Sequence[WorkerInfo]) -> None:
        """Keep a link to each of these prefill workers, and to no other; transfers of those that left end."""
        for peer in self._peers.announce(workers):
            self._end_transfers(peer, f"worker {peer.info.worker_id} was removed")

    def link_lost(self, peer: SourcePeer, reason: str) -> None:
        """See PeerEvents: transfers go on over the next link, but not for ever."""
        for prefill in self._transfers_of(peer):
            present = prefill.present
            assert present is not None, "selected by it"
            present.num_link_losses += 1
            if present.num_link_losses > MAX_FAILOVERS:
                self._execute(prefill, present.machine.failed(reason, tell_source=True))
                continue
            prefill.timeline.mark(f"link lost: {reason}; goes on over the next one")
            self._reaper.watch(present.transfer, present.limit_s, ("link lost", present.num_link_losses))
            self._metrics.failovers.inc()

    def peer_lost(self, peer: SourcePeer, reason: str) -> None:
        """See PeerEvents."""
        self._end_transfers(peer, reason)

    def _end_transfers(self, peer: SourcePeer, cause: str) -> None:
        for prefill in self._transfers_of(peer):
            if prefill.present is not None:
                self._execute(prefill, prefill.present.machine.failed(cause, tell_source=True))

    def _transfers_of(self, peer: SourcePeer) -> list[RemotePrefill]:
        transfers = self._transfers.values()
        return [prefill for prefill in transfers if prefill.present is not None and prefill.present.peer is peer]

    # Requests.

    def offer(self, request: Request, sources: Sequence[WorkerId], timeline: Timeline, *, may_wait: bool) -> Offer:
        """Take a request, or say that the engine should compute its prompt, or that there is no room.

        Reserves without waiting for a step.
        """
        if not any(self._peers.usable(worker_id) is not None for worker_id in sources):
            self._metrics.local.labels("no prefill worker").inc()
            return Offer.LOCAL
        names = self._scheduler.prefix_names(request)
        if self._is_quicker_here(request, names):
            self._metrics.local.labels("cached here").inc()
            timeline.mark("most of the prompt is cached here")
            return Offer.LOCAL
        prefill = RemotePrefill(
            request=request,
            sources=list(sources),
            coverage=Coverage(self._settings.layout),
            names=names,
            timeline=timeline,
        )
        if not self._waiting and self._reserve(prefill):
            self._prefills[prefill.key] = prefill
            self._try_next(prefill)
            return Offer.TAKEN
        if not may_wait or len(self._waiting) >= self._max_waiting:
            return Offer.BUSY
        timeline.mark("waits for room")
        self._prefills[prefill.key] = prefill
        self._waiting.append(prefill)
        return Offer.TAKEN

    def _is_quicker_here(self, request: Request, names: list[PrefixHash]) -> bool:
        """True if this worker holds most of the prompt, and the rest is no more than a step takes."""
        if request.sampling.num_prompt_logprobs is not None:
            # Its whole prompt is computed wherever it goes.
            return False
        num_held = self._scheduler.num_cached_now(names)
        num_left = len(request.prompt_token_ids) + len(request.resume_token_ids) - num_held
        return num_held >= num_left and num_left <= self._scheduler.max_batch_tokens

    def abort(self, key: AttemptKey) -> Request | None:
        """The client left; return the request as it was, None if it is not here (the engine has it, or nobody)."""
        prefill = self._prefills.get(key)
        if prefill is None:
            return None
        prefill.is_wanted = False
        if prefill.present is None:
            if prefill in self._waiting:
                self._waiting.remove(prefill)
            self._forget(prefill)
        else:
            self._execute(prefill, prefill.present.machine.failed("the client left", tell_source=True))
        return prefill.request

    def fail_all(self, cause: str) -> None:
        """The engine failed, and the requests have ended with the cause: stop fetching for them (I11)."""
        for key in list(self._prefills):
            self.abort(key)
        logger.warning("%s: every transfer to this worker ends", cause)

    def admit_waiting(self) -> None:
        """Offer requests that waited for room, in order, as far as there is room now."""
        while self._waiting and self._reserve(self._waiting[0]):
            self._try_next(self._waiting.popleft())

    def _reserve(self, prefill: RemotePrefill) -> bool:
        if not prefill.needs_kv:
            return True
        if self._scheduler.num_waiting:
            # What the engine put back for want of blocks comes first.
            return False
        reservation = self._scheduler.reservations.reserve(prefill.num_tokens, prefill.names)
        if reservation is None:
            return False
        prefill.reservation = reservation
        prefill.coverage.add_prefix(reservation.num_cached_blocks * self._settings.layout.block_size)
        return True

    def _try_next(self, prefill: RemotePrefill) -> None:
        while prefill.sources:
            peer = self._peers.usable(prefill.sources.pop(0))
            if peer is not None and self._has_room(prefill):
                self._call(prefill, peer)
                return
        self._go_local(prefill)

    def _has_room(self, prefill: RemotePrefill) -> bool:
        reservation = prefill.reservation
        if reservation is None or not reservation.is_bound:
            return True
        return self._scheduler.reservations.grow(reservation, prefill.num_tokens)

    def _call(self, prefill: RemotePrefill, peer: SourcePeer) -> None:
        settings, request = self._settings, prefill.request
        transfer = TransferId(
            request_id=request.request_id,
            attempt=request.attempt,
            transfer_no=next(self._transfer_numbers),
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
        self._peers.landings.expect(transfer)
        self._reaper.watch(transfer, settings.config.queued_timeout_s)
        num_held = prefill.coverage.num_held(prefill.num_tokens) if prefill.needs_kv else 0
        held = f", {num_held} tokens held" if num_held else ""
        prefill.timeline.mark(f"asked {peer.info.worker_id} over {peer.transports}{held}")
        settings.transports.wake()
        peer.post(
            Prefill(
                transfer=transfer,
                request=request,
                num_tokens_held=num_held,
                needs_kv=prefill.needs_kv,
                deadline_s=settings.config.deadline_s,
            )
        )

    def _go_local(self, prefill: RemotePrefill) -> None:
        """Let the engine compute what is missing."""
        self._metrics.local.labels("no prefill worker left").inc()
        del self._prefills[prefill.key]
        reservation = prefill.reservation
        if reservation is None:
            prefill.timeline.mark("computes the prompt here")
            self._owner.submit(prefill.request)
            return
        num_usable = prefill.coverage.num_usable(prefill.num_tokens)
        if prefill.needs_scores:
            # Each prompt token's hidden state is needed: nothing of it may be skipped.
            num_usable = 0
        self._scheduler.reservations.trim(reservation, num_usable)
        prefill.timeline.mark(f"computes the prompt here, {num_usable} tokens held")
        self._owner.join(prefill.request, reservation, num_usable)

    def _forget(self, prefill: RemotePrefill) -> None:
        del self._prefills[prefill.key]
        if prefill.reservation is not None:
            self._scheduler.reservations.release(prefill.reservation)
        self.admit_waiting()

    # Transfers.

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
                self._with(transfer, lambda present: present.machine.first_token(token))
            case Final(transfer=transfer):
                self._finalised(message)
            case TransferAbort(transfer=transfer, reason=reason):
                self._with(transfer, lambda present: present.machine.failed(reason, tell_source=False))
            case Progress():
                self._progressed(peer, message)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} from a source")

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
        if len(message.num_chunks) != len(prefill.present.peer.streams):
            raise ProtocolError(f"FINAL counts {len(message.num_chunks)} streams")
        metrics = self._metrics
        metrics.queue.observe(message.queue_s)
        metrics.credit_stall.observe(message.stall_s)
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
                mark = (item.num_computed_tokens, item.num_sent_chunks, message.num_engine_tokens)
                limit_s = config.streaming_timeout_s
            limit_s = max(limit_s, 2 * message.predicted_step_s)
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
                self._scheduler.reservations.bind(prefill.reservation)
                self._peers.landings.bind(present.transfer, self._targets(prefill.reservation, present))
                # A redeemed promise makes room for the next one.
                self._loop.call_soon(self.admit_waiting)
            case EmitFirstToken(token=token):
                present.token_time = self._settings.clock.now()
                prefill.timeline.mark("first token")
                before = prefill.request
                prefill.emit(token.token_ids)
                self._owner.emit(before, token)
            case PostCommit():
                present.peer.post(Commit(transfer=present.transfer))
            case PostAbort(reason=reason_text):
                present.peer.post(TransferAbort(transfer=present.transfer, reason=reason_text))
            case Unbind():
                self._peers.landings.unbind(present.transfer)
            case JoinBatch():
                self._join(prefill, present)
            case _:
                self._ended(prefill, present, instruction.cause)

    def _targets(self, reservation: Reservation, present: Try) -> list[BlockTarget]:
        return [
            BlockTarget(
                copier,
                present.peer.streams,
                reservation.blocks,
                present.num_tokens,
                num_cached_tokens=reservation.num_cached_blocks * self._settings.layout.block_size,
            )
            for copier in self._settings.copiers
        ]

    def _join(self, prefill: RemotePrefill, present: Try) -> None:
        self._close_transfer(prefill, present)
        if present.last_chunk_time is not None:
            since_s = self._settings.clock.now() - present.last_chunk_time
            prefill.timeline.mark(f"all verified (last chunk {since_s * 1000:.1f} ms ago), committed, joins the batch")
        if present.token_time is not None:
            self._metrics.commit.observe(self._settings.clock.now() - present.token_time)
        del self._prefills[prefill.key]
        assert prefill.reservation is not None, "a transfer of KV has its reservation"
        self._owner.join(prefill.request, prefill.reservation, present.num_tokens)

    def _ended(self, prefill: RemotePrefill, present: Try, cause: str | None) -> None:
        self._close_transfer(prefill, present)
        if cause is None or not prefill.is_wanted:
            self._forget(prefill)
            return
        prefill.timeline.mark(f"failed: {cause}")
        logger.warning(
            "request_id=%s worker_id=%s prefill failed: %s",
            prefill.request.request_id,
            present.peer.info.worker_id,
            cause,
        )
        self._metrics.replays.inc()
        self._try_next(prefill)

    def _close_transfer(self, prefill: RemotePrefill, present: Try) -> None:
        # No copy is in hand: every chunk was scattered, or UNBIND was answered, or nothing was ever bound.
        self._peers.landings.unbind(present.transfer)
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

    # See ChunkEvents.

    def chunk_scattered(self, header: Chunk) -> None:
        """A chunk is verified and in its blocks."""
        cargo = _cargo_of(header)
        prefill = self._find(cargo.transfer)
        if prefill is None or prefill.present is None:
            return
        present, now = prefill.present, self._settings.clock.now()
        if present.first_chunk_time is None:
            present.first_chunk_time = now
            prefill.timeline.mark("first chunk")
        present.last_chunk_time = now
        present.num_bytes += header.num_bytes
        self._metrics.received_bytes.inc(header.num_bytes)
        self._reaper.watch(cargo.transfer, present.limit_s, ("chunk", header.link_no, header.seq))
        self._execute(prefill, present.machine.chunk_verified(header.stream_no, cargo.chunk_no, cargo.range))

    def chunk_dropped(self, header: Chunk) -> None:
        """A chunk that nobody wants."""
        self._metrics.stale.inc()

    def chunk_refused(self, header: Chunk, reason: str) -> bool:
        """A chunk that failed its checksum is sent again; one that does not belong ends its transfer."""
        cargo = _cargo_of(header)
        prefill = self._transfers.get(cargo.transfer)
        if prefill is not None and prefill.present is not None and reason in (CHECKSUM, SCATTER_FAILED):
            # What an earlier chunk or try had verified there may be overwritten now.
            prefill.coverage.remove(prefill.present.peer.streams[header.stream_no].sink_rank, cargo.range)
            prefill.present.machine.chunk_damaged(header.stream_no, cargo.chunk_no)
        if reason == CHECKSUM:
            self._metrics.checksum_failures.inc()
            return True
        self._with(cargo.transfer, lambda present: present.machine.failed(reason, tell_source=True))
        return False

    def unbound(self, transfer: TransferId) -> None:
        """Nothing writes the transfer's blocks any more."""
        prefill = self._transfers.get(transfer)
        if prefill is not None and prefill.present is not None:
            self._execute(prefill, prefill.present.machine.unbound())

    # Deadlines.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for transfer, limit_s in self._reaper.overdue():
                try:
                    self._fail_overdue(transfer, limit_s)
                except Exception:
                    # The barrier of this task: one transfer that fails badly does not cost the others (I6).
                    logger.exception("a deadline of the sink failed")
            for peer in self._peers.all():
                if not self._transfers_of(peer):
                    peer.prefer_better()

    def _fail_overdue(self, transfer: TransferId, limit_s: float) -> None:
        cause = f"no progress for {limit_s:.1f} s"
        self._with(transfer, lambda present: present.machine.failed(cause, tell_source=True))


def _cargo_of(header: Chunk) -> Cargo:
    assert header.cargo is not None, "test patterns are reported by themselves"
    return header.cargo


class _Act(Protocol):
    def __call__(self, present: Try) -> list[SinkInstruction]:
        """Apply an event to a transfer's machine."""
