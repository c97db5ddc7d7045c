"""What happened to a request in one process, and when: for the log and for `pdserve explain`."""

from collections import OrderedDict

from pdserve.cluster.base.clock import Clock

MAX_KEPT = 1000


class Timeline:
    """Marks of one request, as offsets from its arrival."""

    def __init__(self, title: str, clock: Clock) -> None:
        self.title = title
        self._clock = clock
        self._start_time = clock.now()
        self._marks: list[tuple[float, str]] = []
        self.is_decoding = False

    def mark(self, text: str) -> None:
        """Note what happens now."""
        self._marks.append((self._clock.now() - self._start_time, text))

    def line(self) -> str:
        """Return everything in one line, for the log."""
        return f"{self.title}: " + ", ".join(f"+{offset * 1000:.1f} ms {text}" for offset, text in self._marks)

    def text(self) -> str:
        """Return one mark a line: time since arrival, time since the mark before, what happened."""
        lines, before = [self.title], 0.0
        for offset, text in self._marks:
            lines.append(f"  {offset * 1000:10.1f} ms  +{(offset - before) * 1000:8.1f}  {text}")
            before = offset
        return "\n".join(lines)


class Timelines:
    """The timelines of the latest requests of a process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, int], Timeline] = OrderedDict()

    def start(self, request_id: str, attempt: int) -> Timeline:
        """Begin a request's timeline; the oldest one is dropped when there are too many."""
        timeline = Timeline(f"{request_id} attempt {attempt}", self._clock)
        self._kept[request_id, attempt] = timeline
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return timeline

    def get(self, request_id: str, attempt: int) -> Timeline | None:
        """Return a request's timeline, if it is still kept."""
        return self._kept.get((request_id, attempt))

    def matching(self, prefix: str) -> tuple[str, ...]:
        """Return the texts of a client request: `prefix` itself, PREFIX-N for further prompts, PREFIX.N for samples."""
        return tuple(
            timeline.text()
            for (request_id, _), timeline in self._kept.items()
            if is_of_client_request(request_id, prefix)
        )


def is_of_client_request(request_id: str, client_id: str) -> bool:
    """True for the id a client was given, CLIENT-N for its further prompts, CLIENT.N for its further samples."""
    return request_id == client_id or request_id.startswith((f"{client_id}-", f"{client_id}."))
