"""Whether a waiting sequence fits now: a row, its cached prefix, and blocks for all that is known of it.

A sequence fits if its known tokens and one more have blocks beyond what running prefills still need, so it is not put
back at once.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.holdings import Holdings
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence


class Admission:
    """Gives waiting sequences what they need to run, or nothing."""

    def __init__(self, pool: BlockPool, tables: RowTables, holdings: Holdings, running: Items[Sequence]) -> None:
        """`running` is the running batch, which changes under it."""
        self._pool = pool
        self._tables = tables
        self._holdings = holdings
        self._running = running
        # What running prefills still need in each group; None if it has to be counted.
        self._owed: list[int] | None = None

    def forget(self) -> None:
        """What running sequences hold or need has changed since the last admission."""
        self._owed = None

    def take(self, sequence: Sequence, budget: int) -> int:
        """Give a sequence its row, prefix and blocks; return the tokens it computes next, 0 if it does not fit now."""
        row = self._tables.take_row()
        if row is None:
            return 0
        sequence.slot = row
        self._holdings.take_prefix(sequence)
        num_scheduled = sequence.next_chunk(budget)
        owed = self._count_owed()
        if not (self._fits(sequence, owed) and self._holdings.bind(sequence, num_scheduled)):
            self._holdings.give_back(sequence)
            self._tables.return_row(row)
            sequence.slot = None
            return 0
        self._holdings.touch_copies(sequence)
        if sequence.num_remaining_tokens > 1:
            for group in range(self._pool.num_groups):
                owed[group] += self._still_needed(group, sequence)
        return num_scheduled

    def fits_without(self, sequence: Sequence, gone: Items[Sequence]) -> bool:
        """True if a sequence would fit if running ones gave back what they alone hold."""
        owed = [count - self._owed_by(group, gone) for group, count in enumerate(self._count_owed())]
        return self._fits(sequence, owed, self._holdings.num_won(gone))

    def _fits(self, sequence: Sequence, owed: Items[int], won: Items[int] | None = None) -> bool:
        for group in range(self._pool.num_groups):
            needed = self._holdings.missing_at_most(group, sequence, sequence.num_tokens + 1)
            available = self._pool.num_available(group) + (won[group] if won else 0)
            if needed + owed[group] > available:
                return False
        return True

    def _count_owed(self) -> list[int]:
        if self._owed is None:
            self._owed = [self._owed_by(group, self._running) for group in range(self._pool.num_groups)]
        return self._owed

    def _owed_by(self, group: int, sequences: Iterable[Sequence]) -> int:
        return sum(self._still_needed(group, item) for item in sequences if item.num_remaining_tokens > 1)

    def _still_needed(self, group: int, sequence: Sequence) -> int:
        return self._holdings.missing_at_most(group, sequence, sequence.num_tokens)
