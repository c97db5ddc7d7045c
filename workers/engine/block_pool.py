"""Block ids of a KV pool: references, generations, promises and the prefix cache, per KV group.

Owns ids, never bytes. Whoever allocates, redeems, acquires or pins releases once. A block without references is free;
its generation has then grown, so that a stale (block, generation) pair is never taken for a live one. Free blocks that
are published in the prefix cache keep their content until they are needed. A *promise* keeps a number of blocks from
everyone else until it is redeemed for ids or cancelled. One lock, held for microseconds: the I/O loop promises and
redeems while the engine thread plans.
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.prefix_hash import CacheEvents, PrefixHash
from pdserve.workers.engine.plan import Int32
from pdserve.workers.engine.prefix_cache import EventLog, FirstBlocks, GroupCache, longest_hit

BlockLists = list[list[int]]
"""Block ids by logical number, one list per KV group; NO_BLOCK where a window has moved on, or the KV never came."""
NO_BLOCK = -1

Counts = Sequence[int]
"""A number of blocks per KV group."""


class BlockPool:
    """Blocks 0 … num_blocks[g] - 1 in each group g."""

    def __init__(self, num_blocks: Counts, *, promised_share: float = 0.25) -> None:
        self.num_blocks = tuple(num_blocks)
        self._most_promised = [int(promised_share * count) for count in num_blocks]
        self._lock = threading.Lock()
        self._log = EventLog()
        self._groups = [_Group(group, count, self._log) for group, count in enumerate(num_blocks)]
        self._promised = [0] * len(self._groups)

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._groups)

    def num_free(self, group: int) -> int:
        """Return the blocks without references, promised ones included."""
        return self._groups[group].num_free

    def num_promised(self, group: int) -> int:
        """Return the blocks promised and not redeemed."""
        return self._promised[group]

    def num_available(self, group: int) -> int:
        """Return the blocks that can be had."""
        return self.num_free(group) - self._promised[group]

    def num_cached(self, group: int) -> int:
        """Return the free blocks whose content still serves hits."""
        return self._groups[group].cache.num_idle

    @property
    def is_all_free(self) -> bool:
        """True if nothing is referenced or promised."""
        return not any(self._promised) and all(
            self.num_free(group) == count for group, count in enumerate(self.num_blocks)
        )

    def generation(self, group: int, block: int) -> int:
        """Return how often the block has lost its last reference."""
        return int(self._groups[group].generations[block])

    def allocate(self, counts: Counts) -> BlockLists | None:
        """Take free blocks of every group, with one reference each; None if not all can be had."""
        with self._lock:
            return self._take(counts) if self._has(counts) else None

    def promise(self, counts: Counts) -> bool:
        """Keep blocks of every group; False if they cannot be had or too many are promised already.

        A request of any size can be promised when nothing else is.
        """
        with self._lock:
            is_over_share = any(self._promised) and any(
                promised + count > most
                for promised, count, most in zip(self._promised, counts, self._most_promised, strict=True)
            )
            if is_over_share or not self._has(counts):
                return False
            self._promised = [promised + count for promised, count in zip(self._promised, counts, strict=True)]
            return True

    def redeem(self, counts: Counts) -> BlockLists:
        """Turn a promise into blocks."""
        with self._lock:
            self._end_promise(counts)
            return self._take(counts)

    def cancel(self, counts: Counts) -> None:
        """Give a promise up."""
        with self._lock:
            self._end_promise(counts)

    def find_prefix(self, chain: Sequence[PrefixHash], firsts: FirstBlocks) -> int:
        """Return how many leading blocks of `chain` could be acquired now. Takes nothing."""
        with self._lock:
            return longest_hit(chain, self._caches, firsts)

    def acquire_prefix(self, chain: Sequence[PrefixHash], firsts: FirstBlocks) -> BlockLists:
        """Reference the blocks that hold the longest cached prefix of `chain`; empty lists if there is none.

        Groups with a window get the blocks that the next token sees. What is promised stays so: if idle blocks cannot
        be had because of that, nothing is taken.
        """
        with self._lock:
            count = longest_hit(chain, self._caches, firsts)
            found = [self._find(group, chain[:count], firsts) for group in range(self.num_groups)]
            idle = [
                sum(cached.references[block] == 0 for block in blocks if block != NO_BLOCK)
                for cached, blocks in zip(self._groups, found, strict=True)
            ]
            if not self._has(idle):
                return [[] for _ in self._groups]
            for cached, blocks in zip(self._groups, found, strict=True):
                cached.acquire([block for block in blocks if block != NO_BLOCK])
            return found

    def share(self, group: int, blocks: Sequence[int]) -> None:
        """Add a reference to distinct blocks in use, NO_BLOCK left out; each is released once more."""
        numbers = np.array([block for block in blocks if block != NO_BLOCK], np.intp)
        with self._lock:
            references = self._groups[group].references
            assert (references[numbers] > 0).all(), f"group {group}: a block of {list(blocks)} is free"
            references[numbers] += 1

    def publish(self, group: int, block: int, name: PrefixHash) -> None:
        """Let a block in use, whose tokens all have their KV, serve hits of `name`."""
        with self._lock:
            self._groups[group].cache.publish(block, name)

    def events_since(self, first_no: int) -> CacheEvents:
        """Return what has changed in the prefix cache since event `first_no`."""
        with self._lock:
            return self._log.since(first_no, self._caches)

    def num_freed(self, group: int, blocks: Sequence[int]) -> int:
        """Return how many blocks would be free if each entry of `blocks` were released once."""
        distinct, counts = np.unique(np.array(blocks, np.intp), return_counts=True)
        with self._lock:
            return int((self._groups[group].references[distinct] == counts).sum())

    def pin(self, group: int, blocks: Int32) -> None:
        """Add a reference to distinct blocks in use: their bytes are being read. `unpin` drops it."""
        with self._lock:
            pool = self._groups[group]
            held = pool.references[blocks]
            assert (held > 0).all(), f"group {group}: a block of {list(blocks)} is free"
            pool.references[blocks] = held + 1
            pool.pins[blocks] += 1

    def unpin(self, group: int, blocks: Int32) -> None:
        """Drop the reference of `pin`; from any thread."""
        with self._lock:
            self._groups[group].pins[blocks] -= 1
            self._groups[group].release(blocks)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """Drop one reference of each of distinct blocks, NO_BLOCK left out; blocks without references become free.

        Of those that are cached the last ones are evicted first: a prefix is of no use without its beginning.
        """
        with self._lock:
            self._groups[group].release(np.array([block for block in blocks if block != NO_BLOCK], np.intp))

    def references(self, group: int) -> Int32:
        """Return a copy of the reference counts, [num_blocks]."""
        counts: Int32 = self._groups[group].references.copy()
        return counts

    def pins(self, group: int) -> Int32:
        """Return a copy of the pin counts, [num_blocks]."""
        counts: Int32 = self._groups[group].pins.copy()
        return counts

    def validate(self) -> None:
        """Check that every block is either free once or referenced, and that promises can be kept."""
        with self._lock:
            for group, pool in enumerate(self._groups):
                assert 0 <= self._promised[group] <= pool.num_free, f"group {group}: promised blocks are not free"
                pool.validate()

    @property
    def _caches(self) -> list[GroupCache]:
        return [pool.cache for pool in self._groups]

    def _find(self, group: int, chain: Sequence[PrefixHash], firsts: FirstBlocks) -> list[int]:
        first = firsts.at_block(group, len(chain))
        found = [self._groups[group].cache.block_of(name) for name in chain[first:]]
        return [NO_BLOCK] * first + [block for block in found if block is not None]

    def _has(self, counts: Counts) -> bool:
        return all(count <= self.num_available(group) for group, count in enumerate(counts))

    def _end_promise(self, counts: Counts) -> None:
        self._promised = [promised - count for promised, count in zip(self._promised, counts, strict=True)]
        assert min(self._promised) >= 0, "more promises ended than made"

    def _take(self, counts: Counts) -> BlockLists:
        return [pool.take(count) for pool, count in zip(self._groups, counts, strict=True)]


class _Group:
    """The blocks of one group; guarded by the pool's lock."""

    def __init__(self, group: int, num_blocks: int, log: EventLog) -> None:
        self._group = group
        self._blank = list(range(num_blocks - 1, -1, -1))
        self.references = np.zeros(num_blocks, np.int32)
        self.pins = np.zeros(num_blocks, np.int32)
        self.generations = np.zeros(num_blocks, np.int64)
        self.cache = GroupCache(group, log)

    @property
    def num_free(self) -> int:
        return len(self._blank) + self.cache.num_idle

    def take(self, count: int) -> list[int]:
        """Take blank blocks, then idle ones, least recently used first."""
        assert count <= self.num_free, f"group {self._group}: {count} blocks wanted, {self.num_free} free"
        split = max(0, len(self._blank) - count)
        blocks = self._blank[split:]
        del self._blank[split:]
        while len(blocks) < count:
            blocks.append(self.cache.evict())
        self.references[blocks] = 1
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                self.cache.use(block)
        self.references[blocks] += 1

    def release(self, blocks: "NDArray[np.intp] | Int32") -> None:
        if not len(blocks):
            return
        left = self.references[blocks] - 1
        assert (left >= 0).all(), f"group {self._group}: a block of {list(blocks)} released more often than taken"
        self.references[blocks] = left
        freed = blocks[left == 0]
        self.generations[freed] += 1
        self._blank += [block for block in reversed(freed.tolist()) if not self.cache.keep(block)]

    def validate(self) -> None:
        where = f"group {self._group}"
        free = self._blank + self.cache.idle
        assert len(set(free)) == len(free), f"{where}: a block is twice in the free list"
        is_free = np.zeros(len(self.references), bool)
        is_free[free] = True
        is_held = self.references > 0
        assert not (is_free & is_held).any(), f"{where}: a free block is referenced"
        assert (is_free | is_held).all(), f"{where}: a block is lost"
        assert (self.pins >= 0).all(), f"{where}: unpinned more often than pinned"
        self.cache.validate()
