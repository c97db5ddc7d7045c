"""Block ids of a KV pool: references, generations and promises, per KV group.

Owns ids, never bytes. Whoever allocates, redeems or pins releases once; a block is free again when its last reference
is gone, and its generation then grows, so that a stale (block, generation) pair is never taken for a live one. A
*promise* keeps a number of blocks from everyone else until it is redeemed for ids or cancelled. One lock, held for
microseconds: the I/O loop promises and redeems while the engine thread plans.
"""

import threading
from collections.abc import Sequence

import numpy as np

from pdserve.workers.engine.plan import Int32

BlockLists = list[list[int]]
"""Block ids, one list per KV group."""


class BlockPool:
    """Blocks 0 … num_blocks - 1 in each of num_groups groups."""

    def __init__(self, *, num_groups: int, num_blocks: int, promised_share: float = 0.25) -> None:
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self._most_promised = int(promised_share * num_blocks)
        self._lock = threading.Lock()
        self._free = [list(range(num_blocks - 1, -1, -1)) for _ in range(num_groups)]
        self._references = np.zeros((num_groups, num_blocks), np.int32)
        self._pins = np.zeros((num_groups, num_blocks), np.int32)
        self._generations = np.zeros((num_groups, num_blocks), np.int64)
        self._num_promised = 0

    @property
    def num_free(self) -> int:
        """Blocks that are free in every group, promised ones included."""
        return min(len(free) for free in self._free)

    @property
    def num_promised(self) -> int:
        """Blocks promised and not redeemed."""
        return self._num_promised

    @property
    def num_available(self) -> int:
        """Blocks that can be had in every group."""
        return self.num_free - self._num_promised

    def generation(self, group: int, block: int) -> int:
        """Return how often the block has been freed."""
        return int(self._generations[group, block])

    def allocate(self, count: int) -> BlockLists | None:
        """Take `count` free blocks of every group, with one reference each; None if not all can be had."""
        with self._lock:
            return self._take(count) if count <= self.num_available else None

    def promise(self, count: int) -> bool:
        """Keep `count` blocks of every group; False if they cannot be had or too many are promised already.

        A request of any size can be promised when nothing else is.
        """
        with self._lock:
            is_over_share = self._num_promised > 0 and self._num_promised + count > self._most_promised
            if is_over_share or count > self.num_available:
                return False
            self._num_promised += count
            return True

    def redeem(self, count: int) -> BlockLists:
        """Turn a promise of `count` blocks into blocks."""
        with self._lock:
            self._end_promise(count)
            return self._take(count)

    def cancel(self, count: int) -> None:
        """Give a promise up."""
        with self._lock:
            self._end_promise(count)

    def pin(self, group: int, blocks: Int32) -> None:
        """Add a reference to distinct blocks in use: their bytes are being read. `unpin` drops it."""
        with self._lock:
            held = self._references[group, blocks]
            assert (held > 0).all(), f"group {group}: a block of {list(blocks)} is free"
            self._references[group, blocks] = held + 1
            self._pins[group, blocks] += 1

    def unpin(self, group: int, blocks: Int32) -> None:
        """Drop the reference of `pin`; from any thread."""
        with self._lock:
            self._pins[group, blocks] -= 1
            self._release(group, blocks)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Drop one reference of each of distinct blocks; blocks without references become free."""
        with self._lock:
            self._release(group, blocks)

    def references(self, group: int) -> Int32:
        """Return a copy of the reference counts, [num_blocks]."""
        counts: Int32 = self._references[group].copy()
        return counts

    def pins(self, group: int) -> Int32:
        """Return a copy of the pin counts, [num_blocks]."""
        counts: Int32 = self._pins[group].copy()
        return counts

    def validate(self) -> None:
        """Check that every block is either free once or referenced, and that promises can be kept."""
        with self._lock:
            assert 0 <= self._num_promised <= self.num_free, "promised blocks are not free"
            for group, free in enumerate(self._free):
                assert len(set(free)) == len(free), f"group {group}: a block is twice in the free list"
                is_free = np.zeros(self.num_blocks, bool)
                is_free[free] = True
                is_held = self._references[group] > 0
                assert not (is_free & is_held).any(), f"group {group}: a free block is referenced"
                assert (is_free | is_held).all(), f"group {group}: a block is lost"
                assert (self._pins[group] >= 0).all(), f"group {group}: unpinned more often than pinned"

    def _end_promise(self, count: int) -> None:
        self._num_promised -= count
        assert self._num_promised >= 0, "more promises ended than made"

    def _take(self, count: int) -> BlockLists:
        taken = []
        for group, free in enumerate(self._free):
            split = len(free) - count
            assert split >= 0, f"group {group}: {count} blocks wanted, {len(free)} free"
            blocks = free[split:]
            del free[split:]
            self._references[group, blocks] = 1
            taken.append(blocks)
        return taken

    def _release(self, group: int, blocks: Sequence[int] | Int32) -> None:
        if not len(blocks):
            return
        numbers = np.asarray(blocks)
        left = self._references[group, numbers] - 1
        assert (left >= 0).all(), f"group {group}: a block of {list(blocks)} released more often than taken"
        self._references[group, numbers] = left
        freed = numbers[left == 0]
        self._generations[group, freed] += 1
        self._free[group].extend(freed.tolist())
