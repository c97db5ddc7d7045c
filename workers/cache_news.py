"""What a worker tells the controller of its prefix cache: changes since the last time, or everything. Pure."""

from collections.abc import Callable, Iterable, Iterator

from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.prefix_hash import CacheEvent, CacheEvents

MOST_NAMES = 1 << 15
"""Of one message."""
_EVERYTHING = -1


class CacheNews:
    """Reads a worker's numbered cache events."""

    def __init__(self, events_since: Callable[[int], CacheEvents], layout: KVLayout) -> None:
        self._events_since = events_since
        self._group = _telling_group(layout)
        self._next_no = _EVERYTHING

    def begin_again(self) -> None:
        """Whoever reads knows nothing: send a snapshot next."""
        self._next_no = _EVERYTHING

    def take(self, worker_id: WorkerId, incarnation: Incarnation) -> Iterator[CacheUpdate]:
        """Yield what is new, in messages of bounded size; nothing if nothing is."""
        news = self._events_since(self._next_no)
        first_no, self._next_no = self._next_no, news.next_no
        if first_no == news.next_no and not news.is_snapshot:
            return
        stored, evicted = self._last_of_each(news.events)
        is_snapshot = news.is_snapshot
        while True:
            head, stored = stored[:MOST_NAMES], stored[MOST_NAMES:]
            tail, evicted = evicted[:MOST_NAMES], evicted[MOST_NAMES:]
            yield CacheUpdate(
                worker_id=worker_id,
                incarnation=incarnation,
                first_no=first_no,
                next_no=news.next_no,
                is_snapshot=is_snapshot,
                stored=b"".join(head),
                evicted=b"".join(tail),
            )
            if not stored and not evicted:
                return
            # The rest of the same changes.
            first_no, is_snapshot = news.next_no, False

    def _last_of_each(self, events: Iterable[CacheEvent]) -> tuple[list[bytes], list[bytes]]:
        last = {event.name: event.is_stored for event in events if event.group == self._group}
        stored = [name for name, is_stored in last.items() if is_stored]
        return stored, [name for name, is_stored in last.items() if not is_stored]


def _telling_group(layout: KVLayout) -> int:
    """Return the KV group whose blocks tell how long a hit is: one that keeps whole prefixes, if there is."""
    return next((number for number, group in enumerate(layout.groups) if not group.window), 0)
