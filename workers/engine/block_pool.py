"""Block ids of a KV pool: references and generations, per KV group.

Owns ids, never bytes. Whoever calls `allocate` or `retain` releases once; a block is free again when its last reference
is gone, and its generation then grows, so that a stale (block, generation) pair is never taken for a live one.
"""

import numpy as np

from pdserve.workers.engine.plan import Int32


class BlockPool:
    """Blocks 0 … num_blocks - 1 in each of num_groups groups."""

    def __init__(self, *, num_groups: int, num_blocks: int) -> None:
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self._free = [list(range(num_blocks - 1, -1, -1)) for _ in range(num_groups)]
        self._references = np.zeros((num_groups, num_blocks), np.int32)
        self._generations = np.zeros((num_groups, num_blocks), np.int64)

    @property
    def num_free(self) -> int:
        """Blocks that can be had in every group."""
        return min(len(free) for free in self._free)

    def generation(self, group: int, block: int) -> int:
        """Return how often the block has been freed."""
        return int(self._generations[group, block])

    def allocate(self, group: int, count: int) -> list[int]:
        """Take `count` free blocks with one reference each; the caller checked `num_free`."""
        free = self._free[group]
        assert 0 <= count <= len(free), f"group {group}: {count} blocks wanted, {len(free)} free"
        split = len(free) - count
        blocks = free[split:]
        del free[split:]
        self._references[group, blocks] = 1
        return blocks

    def retain(self, group: int, block: int) -> None:
        """Add a reference to a block in use."""
        assert self._references[group, block] > 0, f"group {group}: block {block} is free"
        self._references[group, block] += 1

    def release(self, group: int, blocks: list[int]) -> None:
        """Drop one reference of each block; blocks without references become free."""
        for block in blocks:
            left = self._references[group, block] - 1
            assert left >= 0, f"group {group}: block {block} released more often than taken"
            self._references[group, block] = left
            if left == 0:
                self._generations[group, block] += 1
                self._free[group].append(block)

    def references(self, group: int) -> Int32:
        """Return a copy of the reference counts, [num_blocks]."""
        counts: Int32 = self._references[group].copy()
        return counts

    def validate(self) -> None:
        """Check that every block is either free once or referenced."""
        for group, free in enumerate(self._free):
            assert len(set(free)) == len(free), f"group {group}: a block is twice in the free list"
            is_free = np.zeros(self.num_blocks, bool)
            is_free[free] = True
            assert not (is_free & (self._references[group] > 0)).any(), f"group {group}: a free block is referenced"
            assert (is_free | (self._references[group] > 0)).all(), f"group {group}: a block is lost"
