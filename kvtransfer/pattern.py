"""The bytes that go through a link before it is used, and after it was idle: they follow from the sequence number."""

PERIOD = 1021
"""A prime, so that no word, page or slot boundary repeats it."""
_BASE = bytes((place * 7 + (place >> 5)) & 0xFF for place in range(PERIOD))


def pattern(seq: int, size: int) -> bytes:
    """Return the `size` bytes of a sequence number."""
    shift = seq * 31
    period = _BASE.translate(bytes((value + shift) & 0xFF for value in range(256)))
    return (period * (-(-size // PERIOD)))[:size]
