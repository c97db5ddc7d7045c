"""Arrays that live as long as a sequence runs: its block table and its sampling parameters, one row (slot) each.

Kept so that a step's plan is a few array gathers instead of a loop over sequences.
"""

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.request import Request
from pdserve.workers.engine.plan import Int32, Int64, RowRules, SamplingArrays


class RowTables:
    """Rows 0 … num_rows - 1; a running sequence holds one, and so does a reservation."""

    def __init__(self, *, num_rows: int, num_groups: int, num_blocks: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows
        self._tables = [np.zeros((num_rows, num_blocks), np.int32) for _ in range(num_groups)]
        self._temperature = np.zeros(num_rows)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows)
        self._min_p = np.zeros(num_rows)
        self._seed = np.zeros(num_rows, np.uint64)
        self._sample = np.zeros(num_rows, np.uint64)
        self._num_logprobs = np.full(num_rows, -1, np.int32)

    def take_row(self) -> int | None:
        """Take a free row; None if there is none. `return_row` gives it back. From any thread."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def fill_row(self, row: int, request: Request) -> None:
        """Set the sampling parameters of a row that was taken."""
        sampling = request.sampling
        self._sample[row] = request.sample
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._num_logprobs[row] = -1 if sampling.num_logprobs is None else sampling.num_logprobs

    @property
    def has_free_row(self) -> bool:
        """True if a row can be taken now."""
        return bool(self._free)

    def return_row(self, row: int) -> None:
        """Free a row."""
        self._free.append(row)

    def extend(self, group: int, row: int, num_held: int, blocks: list[int]) -> None:
        """Append blocks to the row's table, which holds `num_held` so far. What is no block is never read."""
        self._tables[group][row, num_held : num_held + len(blocks)] = blocks

    def block_tables(self, rows: NDArray[np.intp], num_columns: int) -> tuple[Int32, ...]:
        """Return one [len(rows), num_columns] table per group."""
        return tuple(table[rows, :num_columns] for table in self._tables)

    def sampling(
        self, rows: NDArray[np.intp], positions: Int64, rules: tuple[tuple[int, RowRules], ...]
    ) -> SamplingArrays:
        """Return the sampling parameters of `rows`; `positions` are the output indexes to draw."""
        return SamplingArrays(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            sample=self._sample[rows],
            position=positions,
            num_logprobs=self._num_logprobs[rows],
            rules=rules,
        )

    def validate(self, *, num_taken: int) -> None:
        """Check that rows are neither lost nor free twice."""
        assert len(set(self._free)) == len(self._free) == self._num_rows - num_taken, "rows do not add up"
