"""Runs the choices of one client request and turns their tokens into pieces of text, in order of arrival.

Counts what the client sees: first token, gaps, endings.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.errors import PdserveError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.metrics import IngressMetrics
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta, TokenLogprobs
from pdserve.router.answers import Usage
from pdserve.router.choice import Choice, ChoicePlan, Piece
from pdserve.router.detokenizer import Decoder
from pdserve.router.dispatch import PlacedStream
from pdserve.router.replay import Replayer, RequestRun

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPiece:
    """A piece of one choice."""

    index: int
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What to run: one engine request per choice, and how to turn its tokens into text. Forks come behind the request
    that they begin with.
    """

    requests: Sequence[Request]
    choices: Sequence[ChoicePlan]
    endpoint: str
    start_time: float


class Answers:
    """Starts answers; holds what they share, and their tasks until these have ended."""

    def __init__(self, replayer: Replayer, decoder: Decoder, metrics: IngressMetrics, clock: Clock) -> None:
        self.replayer = replayer
        self.decoder = decoder
        self.metrics = metrics
        self.clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, plan: AnswerPlan) -> "Answer":
        """Place every choice and wait for its first event.

        Raises what Replayer.open raises; then nothing of the answer is left running.
        """
        answer = Answer(plan, self)
        try:
            await answer.wait_placed()
        except BaseException:
            answer.close()
            raise
        return answer

    def keep(self, task: "asyncio.Task[None]") -> None:
        """Hold a reference to a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Wait for the tasks of closed answers."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Answer:
    """The choices of one client request, one engine request each. `close` must be called; it may be called twice."""

    def __init__(self, plan: AnswerPlan, shared: Answers) -> None:
        self.choices = [Choice(index, shared.decoder, choice) for index, choice in enumerate(plan.choices)]
        self._plan = plan
        self._shared = shared
        self._has_first_token = False
        self._prompt_scores: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        self._is_closed = False
        self._pieces: asyncio.Queue[IndexedPiece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._placed: list[asyncio.Future[None]] = [loop.create_future() for _ in self.choices]
        self._forks: dict[RequestId, asyncio.Future[PlacedStream | None]] = {
            request_id: loop.create_future() for request in plan.requests for request_id in request.forks
        }
        self._tasks = [
            asyncio.create_task(self._run(choice, request, placed), name=request.request_id)
            for choice, request, placed in zip(self.choices, plan.requests, self._placed, strict=True)
        ]
        for task in self._tasks:
            shared.keep(task)
        shared.metrics.active.inc()

    async def wait_placed(self) -> None:
        """Return when every choice has its first event; raises the first error."""
        await asyncio.gather(*self._placed)

    async def pieces(self) -> AsyncIterator[IndexedPiece]:
        """Yield pieces until every choice has ended. Raises the first error of any choice."""
        num_open = len(self.choices)
        while num_open:
            item = await self._pieces.get()
            if isinstance(item, Exception):
                raise item
            if item.piece.finish_reason is not None:
                num_open -= 1
            yield item

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt counted once."""
        return Usage(
            num_prompt_tokens=sum(choice.num_prompt_tokens for choice in self._first_samples()),
            num_completion_tokens=sum(choice.num_tokens for choice in self.choices),
            num_cached_tokens=sum(choice.num_cached_tokens for choice in self._first_samples()),
        )

    def _first_samples(self) -> list[Choice]:
        return [
            choice for choice, request in zip(self.choices, self._plan.requests, strict=True) if request.sample == 0
        ]

    def close(self) -> None:
        """Abort what has not ended. Does not wait: also callable while cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for placed in self._placed:
            if placed.done() and not placed.cancelled():
                placed.exception()  # marks it as seen: gather raised only the first
        self._shared.metrics.active.dec()
        self._shared.metrics.e2e.observe(self._shared.clock.now() - self._plan.start_time)

    async def _run(self, choice: Choice, request: Request, placed: "asyncio.Future[None]") -> None:
        finished = self._shared.metrics.finished
        try:
            fork = self._forks.get(request.request_id)
            start = None if fork is None else await _taken(fork)
            async with self._shared.replayer.open(request, start) as run:
                for request_id in request.forks:
                    self._forks[request_id].set_result(run.take_fork(request_id))
                if not placed.done():
                    placed.set_result(None)
                reason = await self._pump(choice, run)
                finished.labels(self._plan.endpoint, reason.value).inc()
        except asyncio.CancelledError:
            finished.labels(self._plan.endpoint, FinishReason.ABORT.value).inc()
            placed.cancel()
            raise
        except Exception as error:
            if not isinstance(error, PdserveError):
                logger.exception("request_id=%s failed in the ingress", request.request_id)
            if placed.done():
                finished.labels(self._plan.endpoint, FinishReason.ERROR.value).inc()
                self._pieces.put_nowait(error)
            else:
                placed.set_exception(error)

    async def _pump(self, choice: Choice, run: RequestRun) -> FinishReason:
        """Feed one choice from its stream until it ends."""
        clock = self._shared.clock
        last_time: float | None = None
        async for delta in run:
            if delta.index == 0:
                delta = self._with_prompt_scores(choice, delta)
            if delta.token_ids:
                now = clock.now()
                self._observe(len(delta.token_ids), now, last_time)
                last_time = now
            piece = choice.push(delta)
            if not piece.is_empty:
                self._pieces.put_nowait(IndexedPiece(index=choice.index, piece=piece))
            if piece.finish_reason is not None:
                return piece.finish_reason
        raise AssertionError("a stream ends with a finish reason")

    def _with_prompt_scores(self, choice: Choice, delta: TokenDelta) -> TokenDelta:
        """A fork that shares its first sample's prompt has that one's log probabilities: these come first."""
        request = self._plan.requests[choice.index]
        first = self._plan.requests[choice.index - request.sample].request_id
        if delta.prompt_logprobs:
            self._prompt_scores.setdefault(first, delta.prompt_logprobs)
            return delta
        return replace(delta, prompt_logprobs=self._prompt_scores.get(first, ()))

    def _observe(self, num_tokens: int, now: float, last_time: float | None) -> None:
        metrics = self._shared.metrics
        metrics.generated_tokens.inc(num_tokens)
        if not self._has_first_token:
            self._has_first_token = True
            metrics.ttft.observe(now - self._plan.start_time)
        if last_time is not None:
            for _ in range(num_tokens):
                metrics.itl.observe((now - last_time) / num_tokens)


async def _taken(fork: "asyncio.Future[PlacedStream | None]") -> PlacedStream | None:
    """Wait for a fork's stream; whoever is cancelled with it in hand gives it up."""
    try:
        return await asyncio.shield(fork)
    except asyncio.CancelledError:
        placed = fork.result() if fork.done() and not fork.cancelled() else None
        if placed is not None:
            placed.release()
        raise
