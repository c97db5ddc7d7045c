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
from pdserve.cluster.base.request import Request, TokenDelta
from pdserve.cluster.base.worker_info import WorkerLoad
from pdserve.workers.engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one turn of the thread produced."""

    deltas: Sequence[TokenDelta]
    refusals: Sequence[tuple[Request, InvalidRequestError | OverloadedError]]
    step_s: float | None
    queue_s: Sequence[float]


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
        self._inbox: deque[Request | tuple[RequestId, int]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_stepping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand over a request; its outcome comes through `publish`."""
        self._put(request)

    def abort(self, request_id: RequestId, attempt: int) -> None:
        """Drop a request at the next step border; no further delta of it is published after that."""
        self._put((request_id, attempt))

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
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._inbox),
            num_queued_prompt_tokens=scheduler.num_queued_prompt_tokens,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_steps=self._engine.num_steps,
            num_generated_tokens=scheduler.num_sampled_tokens,
            num_prefilled_tokens=scheduler.num_prefilled_tokens,
            num_preemptions=scheduler.num_preemptions,
            has_runnable_work=self._is_stepping or bool(self._inbox),
            predicted_step_s=times.predicted_s,
        )

    def _put(self, item: Request | tuple[RequestId, int]) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._engine.runner.bind_thread()
            while self._wait_for_work():
                self._turn()
        except Exception as error:
            logger.exception("the engine failed")
            self._is_stepping = False
            self._on_failure(f"{type(error).__name__}: {error}")

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._inbox or self._engine.scheduler.has_work):
                self._is_stepping = False
                self._wake.wait()
            self._is_stepping = True
            return not self._stopping

    def _turn(self) -> None:
        refusals = self._drain_inbox()
        num_steps = self._engine.num_steps
        deltas = self._engine.step()
        step_s = self._engine.times.last_s if self._engine.num_steps > num_steps else None
        queue_s = self._engine.scheduler.take_queue_times()
        self._publish(StepResult(deltas=deltas, refusals=refusals, step_s=step_s, queue_s=queue_s))

    def _drain_inbox(self) -> list[tuple[Request, InvalidRequestError | OverloadedError]]:
        refusals: list[tuple[Request, InvalidRequestError | OverloadedError]] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                try:
                    self._engine.scheduler.add(item)
                except (InvalidRequestError, OverloadedError) as error:
                    refusals.append((item, error))
            else:
                self._engine.scheduler.abort(*item)
        return refusals
