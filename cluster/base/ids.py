"""Identifier types. All are drawn by our side; a client's id is never used as a key."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
IngressId = NewType("IngressId", str)
Incarnation = NewType("Incarnation", str)
"""64 random bits in hex, drawn at every engine start: two lives of one worker never share it."""

AttemptKey = tuple[RequestId, int]
"""A request and its attempt: what a worker's tables are keyed by."""


def draw_incarnation() -> Incarnation:
    """Return a fresh incarnation."""
    return Incarnation(secrets.token_hex(8))
