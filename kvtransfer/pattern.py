"""The bytes that go through a link before it is used, and after it was idle: they follow from the sequence number."""

PERIOD = 1021
"""A prime, so that no word, page or slot boundary repeats it."""


def pattern(seq: int, size: int) -> bytes:
    """Return the `size` bytes of a sequence number."""
    period = bytes((seq * 31 + place * 7 + (place >> 5)) & 0xFF for place in range(PERIOD))
    return (period * (-(-size // PERIOD)))[:size]
