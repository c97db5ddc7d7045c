"""The threads of a worker as callbacks of the event loop: same code, another order of turns, drawn from a seed."""

import asyncio
import random
from typing import Any

import pytest

from pdserve.kvtransfer.landing import LandingThread
from pdserve.kvtransfer.sender import ChunkSender
from pdserve.workers.engine_thread import BLOCKED_WAIT_S, EngineThread


class Turns:
    """Calls `turn` soon, once for any number of wishes; the pause before it is random."""

    rng = random.Random(0)
    slowness = 1.0
    """Set by the simulation, as the rng."""

    def __init__(self, turn: Any, longest_s: float) -> None:
        self._turn = turn
        self._longest_s = longest_s
        self._handle: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def wish(self, delay_s: float | None = None) -> None:
        """Call `turn`, unless it will be called already."""
        if self._handle is None:
            pause_s = self.rng.uniform(0.0, self._longest_s) * self.slowness if delay_s is None else delay_s
            self._handle = self._loop.call_later(pause_s, self._run)

    def stop(self) -> None:
        """Call it no more."""
        if self._handle is not None:
            self._handle.cancel()

    def _run(self) -> None:
        self._handle = None
        self._turn()


class LoopCondition:
    """A condition that nobody waits for: `notify` makes a turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        """Nobody else runs."""

    def __exit__(self, *exc_info: object) -> None:
        """Nobody else runs."""

    def notify(self) -> None:
        """See threading.Condition."""
        self._turns.wish()


class LoopLanding(LandingThread):
    """See LandingThread."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = Turns(self._turn, 0.001)
        self._wake = LoopCondition(self._turns)  # type: ignore[assignment]

    def start(self) -> None:
        """See LandingThread."""

    def stop(self, timeout_s: float) -> bool:
        """See LandingThread."""
        while self._commands:
            self._turn()
        self._turns.stop()
        return True

    def _turn(self) -> None:
        command = self._commands.popleft() if self._commands else None
        if command is None:
            return
        self._carry_out(command)
        if self._commands:
            self._turns.wish()


class LoopSender(ChunkSender):
    """See ChunkSender."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turns = Turns(self._turn, 0.001)
        self._wake = LoopCondition(self._turns)  # type: ignore[assignment]
        self._has_started = self._has_ended = False

    def start(self) -> None:
        """See ChunkSender."""
        self._has_started = True
        self._turns.wish()

    def join(self, timeout_s: float) -> bool:
        """See ChunkSender."""
        self._end()
        return True

    def _turn(self) -> None:
        if not self._has_started or self._has_ended:
            return
        if self._is_closing:
            self._end()
            return
        work = self._next_work()
        if work is None:
            return
        try:
            self._carry_out(work)
        except OSError as error:
            self._events.link_broken(f"{type(error).__name__}: {error}")
            self._end()
            return
        self._turns.wish()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._turns.stop()
            self._clean_up()


class LoopEngineThread(EngineThread):
    """See EngineThread; a step takes some virtual milliseconds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = Turns(self._next, 0.003)
        self._wake = LoopCondition(self._turns)  # type: ignore[assignment]

    def start(self) -> None:
        """See EngineThread."""
        self._engine.runner.bind_thread()
        self._turns.wish()

    def stop(self, timeout_s: float) -> bool:
        """See EngineThread."""
        self._stopping = True
        self._turns.stop()
        return True

    def _next(self) -> None:
        if self._stopping:
            return
        try:
            can_go_on = self._turn()
        except Exception as error:  # noqa: BLE001 — the barrier of the engine thread
            self._stopping = True
            self._on_failure(f"{type(error).__name__}: {error}")
            return
        self._is_stepping = self._engine.has_work
        if self._inbox or self._engine.has_work:
            self._turns.wish(None if can_go_on else BLOCKED_WAIT_S)


def use_loop_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers made from now on have no threads."""
    monkeypatch.setattr("pdserve.workers.worker.EngineThread", LoopEngineThread)
    monkeypatch.setattr("pdserve.workers.handoff.sink_rank.LandingThread", LoopLanding)
    monkeypatch.setattr("pdserve.workers.handoff.outgoing_link.ChunkSender", LoopSender)
