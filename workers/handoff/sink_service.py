"""The sink side of a worker: has prefill workers compute prompts, and joins the requests to the batch.

Runs on the worker's loop; the worker owns the request and is told its first token. Each request reserves room before a
prefill worker is asked, so what arrives always has its place. If a try fails, the next prefill worker of the route is
asked for what is missing; after the last one the engine computes the rest itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from pdserve.cluster.base.ids import AttemptKey, WorkerId
from pdserve.cluster.base.metrics import TransferMetrics
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.cluster.base.rank_messages import HandoffReport
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.timeline import Timeline
from pdserve.cluster.base.worker_info import LinkView, TransferFit, WorkerInfo
from pdserve.kvtransfer.layout import Coverage
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.handoff.incoming_transfers import IncomingTransfers
from pdserve.workers.handoff.remote_prefill import RemotePrefill
from pdserve.workers.handoff.settings import HandoffSettings, RankPort
from pdserve.workers.handoff.source_peer import SourcePeer

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
        self,
        engine: Engine,
        owner: RequestOwner,
        settings: HandoffSettings,
        metrics: TransferMetrics,
        max_waiting: int,
        ranks: Sequence[RankPort],
    ) -> None:
        """`ranks` are the worker's, in order."""
        self._scheduler = engine.scheduler
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._settings = settings
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._transfers = IncomingTransfers(settings, self, metrics, ranks)
        self._peers = self._transfers.peers
        self._prefills: dict[AttemptKey, RemotePrefill] = {}
        self._waiting: deque[RemotePrefill] = deque()

    async def start(self) -> None:
        """Begin to watch deadlines."""
        await self._transfers.start()

    async def stop(self) -> None:
        """Disconnect from every source."""
        await self._transfers.stop()

    @property
    def num_receiving(self) -> int:
        """Requests that are not in the engine yet."""
        return len(self._prefills)

    @property
    def is_idle(self) -> bool:
        """True if no request, binding, deadline or occupied slot is left (I16)."""
        return not self._prefills and self._transfers.is_idle

    def links(self) -> tuple[LinkView, ...]:
        """Return every link, for status."""
        return tuple(view for peer in self._peers.all() for view in peer.views(self._transfers.num_of(peer)))

    def transfer_fits(self) -> tuple[TransferFit, ...]:
        """Return how long transfers take, by source, as far as there were any."""
        return tuple(fit for peer in self._peers.all() if (fit := peer.fit).num_observations)

    def refresh_gauges(self) -> None:
        """Set the gauges of the sink side."""
        self._metrics.receiving.set(len(self._transfers))
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.oldest.set(self._transfers.oldest_s)
        self._metrics.links.set(sum(link.state == "open" for link in self.links()))

    def reported(self, report: HandoffReport) -> None:
        """A rank reports; on the loop."""
        self._transfers.reported(report)

    # Prefill workers.

    def announce(self, workers: Sequence[WorkerInfo]) -> None:
        """Keep links to each of these prefill workers, and to no other; transfers of those that left end."""
        for peer in self._peers.announce(workers):
            self._transfers.peer_lost(peer, f"worker {peer.info.worker_id} was removed")

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
            self._transfers.fail(prefill, "the client left")
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
                self._transfers.begin(prefill, peer)
                return
        self._go_local(prefill)

    def _has_room(self, prefill: RemotePrefill) -> bool:
        reservation = prefill.reservation
        if reservation is None or not reservation.is_bound:
            return True
        return self._scheduler.reservations.grow(reservation, prefill.num_tokens)

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

    # See TransferOwner.

    def has_tokens(self, token_ids: tuple[int, ...]) -> bool:
        """True if the model has these tokens."""
        return self._scheduler.has_tokens(token_ids)

    def starts(self, prefill: RemotePrefill) -> None:
        """The source computes: redeem the promise of blocks."""
        assert prefill.reservation is not None, "a transfer of KV has its reservation"
        self._scheduler.reservations.bind(prefill.reservation)
        # A redeemed promise makes room for the next one.
        self._loop.call_soon(self.admit_waiting)

    def emit(self, prefill: RemotePrefill, token: TokenDelta) -> None:
        """The first token was sampled."""
        before = prefill.request
        prefill.emit(token.token_ids)
        self._owner.emit(before, token)

    def complete(self, prefill: RemotePrefill, num_tokens: int) -> None:
        """The KV of `num_tokens` is verified: the request joins the batch."""
        del self._prefills[prefill.key]
        assert prefill.reservation is not None, "a transfer of KV has its reservation"
        self._owner.join(prefill.request, prefill.reservation, num_tokens)

    def ended(self, prefill: RemotePrefill, source: SourcePeer, cause: str | None) -> None:
        """A transfer is over: by its first token, because nobody wants it, or by failure: the next source is asked."""
        if cause is None or not prefill.is_wanted:
            self._forget(prefill)
            return
        prefill.timeline.mark(f"failed: {cause}")
        logger.warning(
            "request_id=%s worker_id=%s prefill failed: %s", prefill.request.request_id, source.info.worker_id, cause
        )
        self._metrics.replays.inc()
        self._try_next(prefill)
