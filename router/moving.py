"""Moves requests away from workers that drain, before these stop: the client sees at most a short pause.

A move is a replay with a warm target. A *warm-up* request of the same tokens goes to another worker first, while the
request goes on where it is: prefill workers, whose caches mostly hold the prompt, ship the KV to the new worker, which
keeps it in its prefix cache. Then the request is replayed there, and only the tokens that it has got meanwhile are
computed. Nothing new can go wrong: whatever fails before the replay leaves the request where it is, and the replay is
the one that follows a worker's death.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pdserve.cluster.base.errors import PdserveError, RetryableError
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.request import Request
from pdserve.cluster.base.worker_info import WorkerState, WorkerView
from pdserve.router.dispatch import Dispatcher

logger = logging.getLogger(__name__)

MOVES_AT_ONCE = 4
WARM_UP_S = 60.0
WARM_UP_TOKENS = 2
"""The least with which a decode worker fetches KV."""
LEAST_LEFT = 8
"""Tokens a request must still be able to get: one about to end is not moved."""


class MovedError(RetryableError):
    """The request goes on at another worker."""

    def __init__(self, target: WorkerId) -> None:
        super().__init__(f"moved to {target}")
        self.target = target


class Movable(Protocol):
    """A request that runs."""

    @property
    def request(self) -> Request:
        """With all that was emitted as resume tokens."""

    @property
    def worker_id(self) -> WorkerId | None:
        """Who has it, if it can be moved now."""

    def move_to(self, target: WorkerId) -> None:
        """Go on at another worker."""


class Mover:
    """Watches the view for workers that drain; knows every request that runs here."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._slots = asyncio.Semaphore(MOVES_AT_ONCE)
        self._runs: dict[Movable, asyncio.Task[None] | None] = {}

    def add(self, run: Movable) -> None:
        """A request begins."""
        self._runs[run] = None

    def remove(self, run: Movable) -> None:
        """A request has ended."""
        task = self._runs.pop(run, None)
        if task is not None:
            task.cancel()

    def view_changed(self, workers: Sequence[WorkerView]) -> None:
        """Begin to move what runs on workers that drain, if somebody else can take it."""
        draining = {view.info.worker_id for view in workers if view.state is WorkerState.DRAINING}
        ready = any(view.state is WorkerState.READY and view.info.role.owns_requests for view in workers)
        if not draining or not ready:
            return
        for run, task in self._runs.items():
            if run.worker_id in draining and (task is None or task.done()):
                self._runs[run] = asyncio.create_task(self._move(run), name=f"move {run.request.request_id}")

    async def _move(self, run: Movable) -> None:
        async with self._slots:
            source = run.worker_id
            if source is None or _num_left(run.request) < LEAST_LEFT:
                return
            try:
                async with asyncio.timeout(WARM_UP_S):
                    target = await self._warm_up(run.request, source)
            except (PdserveError, TimeoutError) as error:
                # The next view tries again; the worker goes on with it meanwhile.
                logger.warning("request_id=%s cannot move yet: %s", run.request.request_id, error)
                return
            if run.worker_id == source:
                run.move_to(target)

    async def _warm_up(self, request: Request, source: WorkerId) -> WorkerId:
        """Bring the KV of what a request has so far into the cache of another worker; return which."""
        num_resumed = len(request.resume_token_ids)
        sampling = replace(
            request.sampling,
            max_tokens=num_resumed + WARM_UP_TOKENS,
            temperature=0.0,
            min_tokens=0,
            ignore_eos=True,
            stop_token_ids=(),
            num_logprobs=None,
            num_prompt_logprobs=None,
        )
        warm_up = replace(
            request,
            request_id=RequestId(f"{request.request_id}.warm-up{request.attempt}"),
            attempt=0,
            forks=(),
            sampling=sampling,
            ttft_limit_s=None,
        )
        placed = await self._dispatcher.place(warm_up, (source,))
        try:
            async for delta in placed.stream:
                if delta.error is not None:
                    raise RetryableError(delta.error)
        finally:
            placed.release()
        return placed.worker_id


def _num_left(request: Request) -> int:
    return request.sampling.max_tokens - len(request.resume_token_ids)
