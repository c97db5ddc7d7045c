"""Stops a text at the first stop string, without ever letting a character of it out. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Filters one output's text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take new text; return what can be no part of a stop string. After a match `is_stopped` is set."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        self._held += text
        matches = [found for found in (self._held.find(stop) for stop in self._stops) if found >= 0]
        if matches:
            self.is_stopped = True
            before, self._held = self._held[: min(matches)], ""
            return before
        keep = self._num_undecided()
        split = len(self._held) - keep
        free, self._held = self._held[:split], self._held[split:]
        return free

    def flush(self) -> str:
        """Return what was held back: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
