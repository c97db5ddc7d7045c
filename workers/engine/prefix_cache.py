"""The prefix cache of one KV group: which blocks hold the KV of which prefix, and which of them may be evicted.

A block is *published* under its name (see cluster/base/prefix_hash) when all its tokens have their KV. While someone
references it, it serves hits and stays; without references it is *idle*: still served, and evicted least recently used
first when blocks run out. Not thread-safe: the block pool owns it, under its lock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import CacheEvent, CacheEvents, PrefixHash

EVENT_HISTORY = 1 << 16
"""Events kept for readers that lag; one further behind gets a snapshot."""


class GroupCache:
    """Names and idle blocks of one group."""

    def __init__(self, group: int, log: "EventLog") -> None:
        self._group = group
        self._log = log
        self._block_of: dict[PrefixHash, int] = {}
        self._name_of: dict[int, PrefixHash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that may be evicted."""
        return len(self._idle)

    @property
    def idle(self) -> list[int]:
        """Blocks that may be evicted, the next one first."""
        return list(self._idle)

    def names(self) -> list[PrefixHash]:
        """Return everything that is held."""
        return list(self._block_of)

    def block_of(self, name: PrefixHash) -> int | None:
        """Return the block published under a name."""
        return self._block_of.get(name)

    def publish(self, block: int, name: PrefixHash) -> None:
        """Serve hits of `name` from a block in use; nothing changes if another block does, or this one is published."""
        if name in self._block_of or block in self._name_of:
            return
        self._block_of[name] = block
        self._name_of[block] = name
        self._log.add(self._group, name, is_stored=True)

    def keep(self, block: int) -> bool:
        """The block has lost its last reference: keep it idle if it is published; False if it is not."""
        if block not in self._name_of:
            return False
        self._idle[block] = None
        return True

    def use(self, block: int) -> None:
        """An idle block is referenced again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the idle block that was used least recently, and return it."""
        block, _ = self._idle.popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._log.add(self._group, name, is_stored=False)
        return block

    def validate(self) -> None:
        """Check that names and blocks are one to one."""
        assert {block: name for name, block in self._block_of.items()} == self._name_of, "names and blocks disagree"
        assert set(self._idle) <= set(self._name_of), "an idle block has no name"


class EventLog:
    """The latest changes of all groups, numbered."""

    def __init__(self) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=EVENT_HISTORY)
        self._next_no = 0

    def add(self, group: int, name: PrefixHash, *, is_stored: bool) -> None:
        """Number one change."""
        self._events.append(CacheEvent(sequence_no=self._next_no, group=group, name=name, is_stored=is_stored))
        self._next_no += 1

    def since(self, first_no: int, caches: Sequence[GroupCache]) -> CacheEvents:
        """Return the events from `first_no` on, or a snapshot if they are not kept any more."""
        oldest_no = self._next_no - len(self._events)
        if not oldest_no <= first_no <= self._next_no:
            return CacheEvents(events=tuple(self._snapshot(caches)), next_no=self._next_no, is_snapshot=True)
        late = islice(self._events, first_no - oldest_no, None)
        return CacheEvents(events=tuple(late), next_no=self._next_no, is_snapshot=False)

    def _snapshot(self, caches: Sequence[GroupCache]) -> Iterator[CacheEvent]:
        for group, cache in enumerate(caches):
            for name in cache.names():
                yield CacheEvent(sequence_no=self._next_no, group=group, name=name, is_stored=True)


def longest_hit(chain: Sequence[PrefixHash], caches: Sequence[GroupCache], firsts: "FirstBlocks") -> int:
    """Return the most leading blocks of `chain` that can be taken over.

    A group without a window must hold all of them, one with a window those that the next token sees.
    """
    runs = []
    limit = len(chain)
    for group, cache in enumerate(caches):
        if not firsts.has_window(group):
            limit = next((number for number in range(limit) if cache.block_of(chain[number]) is None), limit)
    for group, cache in enumerate(caches):
        if firsts.has_window(group):
            runs.append((group, _run_lengths(chain[:limit], cache)))
    for count in range(limit, 0, -1):
        if all(run[count - 1] >= count - firsts.at_block(group, count) for group, run in runs):
            return count
    return 0


def _run_lengths(chain: Sequence[PrefixHash], cache: GroupCache) -> list[int]:
    """Return, per block, how many blocks without a gap end with it."""
    runs, length = [], 0
    for name in chain:
        length = length + 1 if cache.block_of(name) is not None else 0
        runs.append(length)
    return runs


class FirstBlocks:
    """Where windows begin, in blocks of a layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._groups = layout.groups
        self._block_size = layout.block_size

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._groups)

    def has_window(self, group: int) -> bool:
        """False for a group that sees everything."""
        return self._groups[group].window > 0

    def first_token(self, group: int, num_tokens: int) -> int:
        """Return the first token that the query at position `num_tokens` sees."""
        return self._groups[group].first_needed(num_tokens)

    def window(self, group: int) -> int:
        """Return the window of a group; 0 if it sees everything."""
        return self._groups[group].window

    def at_token(self, group: int, num_tokens: int) -> int:
        """Return the first block that the query at position `num_tokens` sees."""
        return self._groups[group].first_needed(num_tokens) // self._block_size

    def whole_at_token(self, group: int, num_tokens: int) -> int:
        """Return the first block of which the query at position `num_tokens` sees all tokens."""
        return -(-self._groups[group].first_needed(num_tokens) // self._block_size)

    def leaves_at(self, group: int, first_block: int) -> int:
        """Return the number of tokens at which a sequence keeps `first_block` no more."""
        return (first_block + 1) * self._block_size + self._groups[group].window

    def kept_at(self, group: int, num_tokens: int) -> int:
        """Return the first block that a sequence of `num_tokens` keeps: its last token can be computed again."""
        return self.at_token(group, max(0, num_tokens - 1))

    def at_block(self, group: int, num_blocks: int) -> int:
        """Return the first block that the token after `num_blocks` whole blocks sees."""
        return self.at_token(group, num_blocks * self._block_size)

    def most_blocks(self, group: int, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at once, if steps add `step_tokens` at most."""
        whole = -(-num_tokens // self._block_size)
        window = self._groups[group].window
        return min(whole, -(-(window + step_tokens) // self._block_size) + 1) if window else whole
