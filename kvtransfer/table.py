"""A state machine as data: (state, event) → state. An illegal pair raises with the history; a terminal state ignores
what comes late, and counts it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from pdserve.cluster.base.errors import ProtocolError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Table = Mapping[tuple[S, E], S]


class IllegalTransitionError(ProtocolError):
    """An event that cannot happen in this state: a peer broke the protocol, or we did."""


class Machine(Generic[S, E]):
    """The present state of one object, and how it came there."""

    def __init__(self, table: Table[S, E], start: S, *, terminal: tuple[S, ...]) -> None:
        self._table = table
        self._terminal = terminal
        self.state = start
        self.history: list[str] = [str(start)]
        self.num_late_events = 0

    @property
    def has_ended(self) -> bool:
        """True in a terminal state."""
        return self.state in self._terminal

    def apply(self, event: E) -> bool:
        """Move on; False if the object had ended, so nothing happened. Raises IllegalTransitionError."""
        if self.has_ended:
            self.num_late_events += 1
            return False
        following = self._table.get((self.state, event))
        if following is None:
            raise IllegalTransitionError(f"{event} in {self.state}; history: {' '.join(self.history)}")
        if following is not self.state:
            self.history.append(f"-{event}-> {following}")
        self.state = following
        return True
