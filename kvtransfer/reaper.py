"""Deadlines of transfers: who has made no progress for too long. Pure; the clock is injected.

The reaper owns all deadlines on a task of its own; it needs no scheduler pass, no collective and no peer (I6). A
deadline moves a transfer to failure; it frees nothing by itself (I7).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.cluster.base.clock import Clock

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Watch:
    limit_s: float
    mark: Hashable
    progress_time: float


class Reaper(Generic[K]):
    """Watches keys; each has a limit and a mark that changes with progress."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watches: dict[K, _Watch] = {}

    def __len__(self) -> int:
        """Keys watched."""
        return len(self._watches)

    def watch(self, key: K, limit_s: float, mark: Hashable = None) -> None:
        """Begin to watch, or note progress: a new mark, or a new limit, starts the time anew."""
        watch = self._watches.get(key)
        if watch is None:
            self._watches[key] = _Watch(limit_s, mark, self._clock.now())
        elif watch.mark != mark or watch.limit_s != limit_s:
            watch.mark, watch.limit_s, watch.progress_time = mark, limit_s, self._clock.now()

    def forget(self, key: K) -> None:
        """Stop watching; fine if it was not watched."""
        self._watches.pop(key, None)

    def overdue(self) -> list[tuple[K, float]]:
        """Return the keys that are out of time, with their limits; they are no longer watched."""
        now = self._clock.now()
        late = [
            (key, watch.limit_s) for key, watch in self._watches.items() if now - watch.progress_time > watch.limit_s
        ]
        for key, _ in late:
            del self._watches[key]
        return late

    @property
    def oldest_s(self) -> float:
        """Seconds since the least recent progress; 0 if nothing is watched."""
        now = self._clock.now()
        return max((now - watch.progress_time for watch in self._watches.values()), default=0.0)
