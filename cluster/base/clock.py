"""Time as a dependency: state machines receive a clock, tests drive it."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return seconds since an arbitrary origin; never goes back."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and the simulator."""

    def __init__(self, start_time: float = 0.0) -> None:
        self._now = start_time

    def now(self) -> float:
        """Return the time set so far."""
        return self._now

    def advance(self, duration_s: float) -> None:
        """Move forward; a negative duration is refused."""
        if duration_s < 0:
            raise ValueError("a clock never goes back")
        self._now += duration_s
