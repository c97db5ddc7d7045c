"""The thread that owns an engine: drains its inbox between steps, steps while there is work, parks otherwise.

The I/O loop calls `submit`, `abort` and `stop`; results go to the two callbacks, once per step. This is the barrier for
engine exceptions: the thread ends and hands the cause to `on_failure`, whose owner ends the live requests.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.cluster.base.errors import InvalidRequestError, OverloadedError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.prefix_hash import CacheEvents
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.worker_info import WorkerLoad
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.engine.scheduler import SlotUse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one turn of the thread produced."""

    deltas: Sequence[TokenDelta]
    refusals: Sequence[tuple[Request, InvalidRequestError | OverloadedError]]
    step_s: float | None
    queue_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    is_prefill_only: bool


@dataclass(frozen=True, slots=True)
class _Join:
    request: Request
    reservation: Reservation
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId
    attempt: int


_Item = _Submit | _Join | _Abort

BLOCKED_WAIT_S = 0.002
"""While every sequence waits for blocks that transfers hold; nothing signals their return."""

Publish = Callable[[StepResult], None]
"""Called on the engine thread; must not block."""
OnFailure = Callable[[str], None]
"""Called on the engine thread, once, with the cause."""


class EngineThread:
    """Runs an engine until stopped or failed."""

    def __init__(self, engine: Engine, publish: Publish, on_failure: OnFailure) -> None:
        self._engine = engine
        self._publish = publish
        self._on_failure = on_failure
        self._inbox: deque[_Item] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_stepping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Hand over a request; its outcome comes through `publish`."""
        self._put(_Submit(request, is_prefill_only))

    def join(self, request: Request, reservation: Reservation, num_computed_tokens: int) -> None:
        """Hand over a request with the KV of its first tokens."""
        self._put(_Join(request, reservation, num_computed_tokens))

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request at the next step border; no further delta of it is published after that."""
        self._put(_Abort(request_id, attempt))

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its step; True if it did in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def load(self) -> WorkerLoad:
        """Return a load report; safe from any thread (it reads single integers)."""
        scheduler, pool, times = self._engine.scheduler, self._engine.pool, self._engine.times
        # What is free of the group with the most blocks limits the worker: a window gives its blocks back.
        scarcest = max(range(pool.num_groups), key=pool.num_blocks.__getitem__)
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._inbox),
            num_queued_prompt_tokens=scheduler.num_queued_prompt_tokens,
            num_context_tokens=scheduler.num_context_tokens,
            num_free_blocks=pool.num_free(scarcest),
            num_blocks=pool.num_blocks[scarcest],
            num_cached_blocks=pool.num_cached(scarcest),
            num_steps=self._engine.num_steps,
            num_generated_tokens=scheduler.num_sampled_tokens,
            num_prefilled_tokens=scheduler.num_prefilled_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_admitted_prompt_tokens=scheduler.num_admitted_prompt_tokens,
            num_cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            num_loaded_blocks=0 if self._engine.host is None else self._engine.host.num_loaded_blocks,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            has_runnable_work=self._is_stepping or bool(self._inbox),
            predicted_step_s=times.predicted_s,
            step_fit=times.fit,
        )

    def slot_use(self) -> dict[int, SlotUse]:
        """Return, by window, what running sequences hold of the KV pool; an estimate while a step runs."""
        scheduler = self._engine.scheduler
        return {window: scheduler.slot_use(group) for group, window in enumerate(scheduler.windows)}

    def cache_events(self, first_no: int) -> CacheEvents:
        """Return what has changed in the prefix cache since; safe from any thread."""
        return self._engine.pool.events_since(first_no)

    def _put(self, item: _Item) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._engine.runner.bind_thread()
            while self._wait_for_work():
                if not self._turn():
                    self._wait_blocked()
        except Exception as error:
            logger.exception("the engine failed")
            self._is_stepping = False
            self._on_failure(f"{type(error).__name__}: {error}")

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._inbox or self._engine.has_work):
                self._is_stepping = False
                self._wake.wait()
            self._is_stepping = True
            return not self._stopping

    def _wait_blocked(self) -> None:
        with self._wake:
            if not (self._stopping or self._inbox):
                self._is_stepping = False
                self._wake.wait(BLOCKED_WAIT_S)

    def _turn(self) -> bool:
        """Take the inbox in and step; False if there are sequences and none of them can go on."""
        # Copies that are settled here give blocks back, for which a request may wait.
        has_news = bool(self._inbox) or self._engine.has_unsettled_copies
        refusals = self._drain_inbox()
        num_steps = self._engine.num_steps
        deltas = self._engine.step()
        has_stepped = self._engine.num_steps > num_steps
        step_s = self._engine.times.last_s if has_stepped else None
        queue_s = self._engine.scheduler.take_queue_times()
        if has_stepped or has_news:
            self._publish(StepResult(deltas=deltas, refusals=refusals, step_s=step_s, queue_s=queue_s))
        return has_stepped or not self._engine.scheduler.has_work

    def _drain_inbox(self) -> list[tuple[Request, InvalidRequestError | OverloadedError]]:
        refusals: list[tuple[Request, InvalidRequestError | OverloadedError]] = []
        while self._inbox:
            item = self._inbox.popleft()
            scheduler = self._engine.scheduler
            try:
                match item:
                    case _Submit(request, is_prefill_only):
                        scheduler.add(request, is_prefill_only=is_prefill_only)
                    case _Join(request, reservation, num_computed_tokens):
                        scheduler.join(request, reservation, num_computed_tokens)
                    case _Abort(request_id, attempt):
                        scheduler.abort(request_id, attempt)
            except (InvalidRequestError, OverloadedError) as error:
                assert not isinstance(item, _Abort), "an abort is never refused"
                if isinstance(item, _Join):
                    scheduler.reservations.release(item.reservation)
                refusals.append((item.request, error))
        return refusals
