"""A request over all its attempts: if its worker dies, it is replayed on another one.

    placed ──▶ streaming ──▶ ended
       ▲           │
       ├─ worker lost ─────────┐
       └─ moved (moving.py) ───┴─ attempt + 1 with the emitted tokens as resume tokens, which are never sampled again

The client sees a pause, no gap and no repetition. Losses are bounded: a request whose workers keep dying may be the
cause, and is failed with that.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.errors import NoWorkerError, OverloadedError, WorkerLostError
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.timeline import Timelines
from pdserve.router.dispatch import Dispatcher, PlacedStream
from pdserve.router.moving import MovedError, Mover

logger = logging.getLogger(__name__)

RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Bounds of a request's attempts."""

    max_attempts: int
    replay_timeout_s: float


class Replayer:
    """Runs requests to their ending."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ReplaySettings,
        timelines: Timelines,
        clock: Clock,
        on_replay: Callable[[], None],
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        self.dispatcher = dispatcher
        self.settings = settings
        self.timelines = timelines
        self.clock = clock
        self.on_replay = on_replay
        self.on_move = on_move
        self._mover = Mover(dispatcher)
        dispatcher.on_view = self._mover.view_changed

    @asynccontextmanager
    async def open(self, request: Request, placed: PlacedStream | None = None) -> AsyncIterator["RequestRun"]:
        """Place a request and wait for its first event; leaving the context aborts what has not ended.

        A fork may be `placed` already, with the request that it began with.

        Raises NoWorkerError, OverloadedError, or WorkerLostError after the last attempt.
        """
        run = RequestRun(request, self, placed)
        self._mover.add(run)
        try:
            await run.start()
            yield run
        finally:
            self._mover.remove(run)
            run.close()


class RequestRun:
    """One request; iterate to get its deltas, over all attempts."""

    def __init__(self, request: Request, shared: Replayer, placed: PlacedStream | None) -> None:
        self._request = request
        self._shared = shared
        self._placed = placed
        self._lost: tuple[WorkerId, ...] = ()
        self._num_losses = 0
        self._timeline = shared.timelines.start(request.request_id, request.attempt)
        self._timeline.mark(f"received, {len(request.prompt_token_ids)} prompt tokens")
        self._ending = "closed before its ending"

    async def start(self) -> None:
        """Place the first attempt; replays it if its worker dies before the first event."""
        try:
            if self._placed is None:
                await self._place()
            else:
                await self._placed.stream.wait_first()
        except WorkerLostError as error:
            await self._replay(error)

    def take_fork(self, request_id: RequestId) -> PlacedStream | None:
        """Return the placed stream of a fork; None if it must be placed by itself: its worker was lost."""
        return None if self._placed is None else self._placed.forks.pop(request_id, None)

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        while True:
            assert self._placed is not None, "iterated after start"
            try:
                async for delta in self._placed.stream:
                    self._request = replace(
                        self._request, resume_token_ids=(*self._request.resume_token_ids, *delta.token_ids)
                    )
                    if delta.finish_reason is not None:
                        self._ending = f"ended: {delta.finish_reason}"
                    yield delta
                return
            except WorkerLostError as error:
                await self._replay(error)
            except MovedError as moved:
                await self._go_on_at(moved.target)

    # See Movable.

    @property
    def request(self) -> Request:
        """With all that was emitted as resume tokens."""
        return self._request

    @property
    def worker_id(self) -> WorkerId | None:
        """Who has it; None between two attempts, and while samples of it are not taken over yet."""
        return None if self._placed is None or self._placed.forks else self._placed.worker_id

    def move_to(self, target: WorkerId) -> None:
        """Go on at another worker, from the next token that is read on."""
        if self._placed is not None:
            self._placed.stream.fail(MovedError(target))

    def close(self) -> None:
        """Abort what has not ended; callable while cancelled."""
        self._release()
        self._timeline.mark(f"{self._ending}, {len(self._request.resume_token_ids)} tokens")
        logger.info("request_id=%s", self._timeline.line())

    async def _place(self, preferred: WorkerId | None = None) -> None:
        self._placed = await self._shared.dispatcher.place(self._request, self._lost, preferred)
        self._timeline.mark(f"first event from {self._placed.worker_id}; {self._placed.stream.route.reason}")

    async def _replay(self, error: WorkerLostError) -> None:
        """Place the next attempt. Raises WorkerLostError when no attempt or no time is left."""
        deadline = self._shared.clock.now() + self._shared.settings.replay_timeout_s
        while True:
            self._note_loss(error)
            try:
                await self._place_until(deadline)
                return
            except WorkerLostError as again:
                error = again
            except (NoWorkerError, OverloadedError) as nobody:
                raise WorkerLostError(f"{error}; no other worker took the request in time: {nobody}") from nobody

    async def _go_on_at(self, target: WorkerId) -> None:
        """Place the next attempt, at `target` if that takes it. Raises WorkerLostError if nobody does in time."""
        self._timeline.mark(f"attempt {self._request.attempt} moves to {target}")
        self._begin_attempt()
        self._shared.on_move()
        deadline = self._shared.clock.now() + self._shared.settings.replay_timeout_s
        try:
            await self._place_until(deadline, target)
        except WorkerLostError as error:
            await self._replay(error)
        except (NoWorkerError, OverloadedError) as nobody:
            raise WorkerLostError(f"it was to move, and no worker took it in time: {nobody}") from nobody

    def _begin_attempt(self) -> None:
        self._release()
        # Its forks are requests of their own by now, or have failed too and are replayed by themselves.
        self._request = replace(self._request, attempt=self._request.attempt + 1, forks=())

    def _note_loss(self, error: WorkerLostError) -> None:
        """Count the loss and begin the next attempt. Raises WorkerLostError after the last one."""
        most = self._shared.settings.max_attempts
        worker_id = self._placed.worker_id if self._placed is not None else error.worker_id
        self._timeline.mark(f"attempt {self._request.attempt} lost: {error}")
        self._begin_attempt()
        self._num_losses += 1
        if most == 1:
            raise error
        if self._num_losses >= most:
            raise WorkerLostError(
                f"{most} workers died while they held this request (ingress.max_attempts); last: {error}"
            ) from error
        if worker_id is not None:
            self._lost = (*self._lost, worker_id)
        logger.warning(
            "request_id=%s attempt %d: replayed after %d tokens: %s",
            self._request.request_id,
            self._request.attempt,
            len(self._request.resume_token_ids),
            error,
        )
        self._shared.on_replay()

    async def _place_until(self, deadline: float, preferred: WorkerId | None = None) -> None:
        """Place the present attempt; waits for a worker until the deadline, then raises why there is none."""
        while True:
            try:
                await self._place(preferred)
                return
            except (NoWorkerError, OverloadedError):
                left_s = deadline - self._shared.clock.now()
                if left_s <= 0:
                    raise
                await self._shared.dispatcher.wait_change(min(RETRY_S, left_s))

    def _release(self) -> None:
        if self._placed is not None:
            self._placed.release()
            self._placed = None
