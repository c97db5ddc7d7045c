"""The life of a link, seen from either end. Pure table.

OPENING ──attached──▶ TESTING ──pattern verified──▶ OPEN ⇄ STALLED
   │                     │                           │        │
   └───────── lost ──────┴─────────── lost ──────────┴────────┘
                                ▼
                             FENCING ──nobody touches its slots──▶ CLOSED
"""

from enum import StrEnum

from pdserve.kvtransfer.table import Machine, Table


class LinkState(StrEnum):
    """Where a link is."""

    OPENING = "opening"
    TESTING = "testing"
    OPEN = "open"
    STALLED = "stalled"
    FENCING = "fencing"
    CLOSED = "closed"


class LinkEvent(StrEnum):
    """What can happen to a link."""

    ATTACHED = "attached"
    TESTED = "tested"
    STALLED = "stalled"
    CREDITED = "credited"
    LOST = "lost"
    FENCED = "fenced"


_LOST: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (state, LinkEvent.LOST): LinkState.FENCING
    for state in (LinkState.OPENING, LinkState.TESTING, LinkState.OPEN, LinkState.STALLED)
}

LINK_TABLE: Table[LinkState, LinkEvent] = {
    **_LOST,
    (LinkState.OPENING, LinkEvent.ATTACHED): LinkState.TESTING,
    (LinkState.TESTING, LinkEvent.TESTED): LinkState.OPEN,
    # A link that has been idle is tested again, in use or not.
    (LinkState.OPEN, LinkEvent.TESTED): LinkState.OPEN,
    (LinkState.STALLED, LinkEvent.TESTED): LinkState.OPEN,
    (LinkState.OPEN, LinkEvent.STALLED): LinkState.STALLED,
    (LinkState.STALLED, LinkEvent.STALLED): LinkState.STALLED,
    (LinkState.TESTING, LinkEvent.STALLED): LinkState.TESTING,
    (LinkState.OPEN, LinkEvent.CREDITED): LinkState.OPEN,
    (LinkState.STALLED, LinkEvent.CREDITED): LinkState.OPEN,
    (LinkState.FENCING, LinkEvent.FENCED): LinkState.CLOSED,
}


class LinkLife(Machine[LinkState, LinkEvent]):
    """One link's state."""

    def __init__(self) -> None:
        super().__init__(LINK_TABLE, LinkState.OPENING, terminal=(LinkState.CLOSED,))

    @property
    def is_usable(self) -> bool:
        """True if new transfers may use it."""
        return self.state is LinkState.OPEN
