"""The sequences that wait for admission, in order of arrival, with the tokens that are known of them."""

from bisect import insort
from collections.abc import Iterator

from pdserve.workers.engine.sequence import Sequence, SequenceState


class WaitQueue:
    """Waiting sequences. One that was put back keeps its place.

    Attributes:
        num_tokens: known tokens of all of them.
    """

    def __init__(self, skip_age_s: float) -> None:
        """A sequence that does not fit may be passed by others for `skip_age_s`."""
        self._skip_age_s = skip_age_s
        self._sequences: list[Sequence] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in at its place."""
        sequence.state = SequenceState.WAITING
        sequence.blocked_time = None
        insort(self._sequences, sequence, key=arrival_no)
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go."""
        self._sequences.remove(sequence)
        self.num_tokens -= sequence.num_tokens

    def note_blocked(self, sequence: Sequence, now: float) -> bool:
        """A sequence does not fit; True if others may still be admitted before it."""
        if sequence.blocked_time is None:
            sequence.blocked_time = now
        return now - sequence.blocked_time < self._skip_age_s

    def validate(self) -> None:
        """Check the order, the count, and that nobody here holds anything."""
        places = [sequence.arrival_no for sequence in self._sequences]
        assert places == sorted(places), "the order of arrival is lost"
        tokens = sum(sequence.num_tokens for sequence in self._sequences)
        assert tokens == self.num_tokens, f"{tokens} tokens wait, counted {self.num_tokens}"
        for sequence in self._sequences:
            assert sequence.state is SequenceState.WAITING
            assert sequence.slot is None
            assert not any(sequence.blocks), "a waiting sequence holds blocks"


def arrival_no(sequence: Sequence) -> int:
    """Return the place in the order of arrival."""
    return sequence.arrival_no
