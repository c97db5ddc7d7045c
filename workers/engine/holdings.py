"""The blocks of sequences: bound as a sequence grows, taken over from the prefix cache, published, given back.

Used by the scheduler on the engine thread. A sequence's `blocks` are by logical number, so equally long in every group.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists, BlockPool, Counts
from pdserve.workers.engine.prefix_cache import FirstBlocks
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence, blocks_for

CopyBlock = Callable[[int, int, int], None]
"""Copies the KV of a block: group, source, target."""


class SecondLevel(Protocol):
    """Holds copies of published blocks outside the pool. See HostTier."""

    def holds(self, group: int, name: PrefixHash) -> bool:
        """True if a copy is here."""

    def save(self, group: int, block: int, name: PrefixHash) -> None:
        """Copy a published block; one that is copied already becomes the most recently used."""

    def load(self, group: int, names: Items[PrefixHash], blocks: Items[int]) -> None:
        """Copy what is held into blocks."""


class Holdings:
    """Moves blocks between one pool and its sequences."""

    def __init__(
        self,
        pool: BlockPool,
        tables: RowTables,
        firsts: FirstBlocks,
        *,
        block_size: int,
        step_tokens: int,
        has_prefix_cache: bool,
        copy_block: CopyBlock,
        host: SecondLevel | None,
        is_load_worth: Callable[[], bool],
    ) -> None:
        """`step_tokens` are the most that one step adds to a sequence.

        With a second level, `is_load_worth` says whether copying a block from there is quicker than computing it.
        """
        self._host = host
        self._is_load_worth = is_load_worth
        self._copy_block = copy_block
        self._pool = pool
        self._tables = tables
        self._firsts = firsts
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._has_prefix_cache = has_prefix_cache
        self._window_groups = [group for group in range(pool.num_groups) if firsts.has_window(group)]

    def take_prefix(self, sequence: Sequence) -> None:
        """Take over what the prefix cache holds of a sequence that has a slot; its last token is always computed."""
        # A prompt that is scored needs the hidden state of each of its tokens.
        if not self._has_prefix_cache or sequence.num_unscored_tokens:
            return
        names = sequence.names(sequence.num_tokens - 1, self._block_size)
        sequence.blocks = self._pool.acquire_prefix(names, self._firsts)
        if self._host is not None and len(names) > len(sequence.blocks[0]) and self._is_load_worth():
            self._load_more(sequence.blocks, names, self._host)
        num_blocks = len(sequence.blocks[0])
        sequence.num_computed_tokens = num_blocks * self._block_size
        sequence.num_published_blocks = num_blocks
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            sequence.first_blocks[group] = self._firsts.at_block(group, num_blocks)
            self._tables.extend(group, sequence.slot, 0, blocks)

    def touch_copies(self, sequence: Sequence) -> None:
        """What a sequence has just taken over is recently used in the second level too."""
        if self._host is None or not sequence.num_published_blocks:
            return
        names = sequence.names(sequence.num_computed_tokens, self._block_size)
        for group, blocks in enumerate(sequence.blocks):
            for name, block in zip(names, blocks, strict=False):
                if block != NO_BLOCK:
                    self._host.save(group, block, name)

    def _load_more(self, blocks: BlockLists, names: Items[PrefixHash], host: SecondLevel) -> None:
        """Append what the second level holds behind a prefix, as far as blocks can be had."""
        start = len(blocks[0])
        groups = range(self._pool.num_groups)
        end = start
        full = [group for group in groups if not self._firsts.has_window(group)]
        while end < len(names) and all(host.holds(group, names[end]) for group in full):
            end += 1
        while end > start:
            firsts = [max(start, self._firsts.at_block(group, end)) for group in groups]
            if all(host.holds(group, name) for group in groups for name in names[firsts[group] : end]):
                break
            end -= 1
        else:
            return
        new = self._pool.allocate([end - first for first in firsts])
        if new is None:
            return
        for group in groups:
            added = names[firsts[group] : end]
            host.load(group, added, new[group])
            blocks[group] += [NO_BLOCK] * (firsts[group] - start) + new[group]
            for block, name in zip(new[group], added, strict=True):
                self._pool.publish(group, block, name)
            # What the longer prefix's window has left.
            kept = self._firsts.at_block(group, end)
            self._pool.release(group, blocks[group][:kept])
            blocks[group][:kept] = [NO_BLOCK] * kept

    def share(self, parent: Sequence, child: Sequence) -> bool:
        """Give a child that has a slot its parent's prompt but the last token; False if that cannot be had now.

        Whole blocks are shared; the one that the child goes on writing is copied.
        """
        computed = child.num_prompt_tokens - 1
        whole = computed // self._block_size
        groups = range(self._pool.num_groups)
        if any(parent.first_blocks[group] > self._firsts.at_token(group, computed) for group in groups):
            return False
        if min(len(blocks) for blocks in parent.blocks) * self._block_size < computed:
            return False
        new = self._pool.allocate([1] * self._pool.num_groups)
        if new is None:
            return False
        assert child.slot is not None
        for group, (blocks, added) in enumerate(zip(parent.blocks, new, strict=True)):
            shared = blocks[:whole]
            self._pool.share(group, shared)
            if computed % self._block_size:
                self._copy_block(group, blocks[whole], added[0])
            child.blocks[group] = [*shared, *added]
            child.first_blocks[group] = parent.first_blocks[group]
            self._tables.extend(group, child.slot, 0, child.blocks[group])
        child.num_computed_tokens = computed
        child.num_published_blocks = whole
        return True

    def bind(self, sequence: Sequence, num_scheduled: int) -> bool:
        """Give a sequence that has a slot the blocks for its next tokens; False if they cannot be had."""
        missing = blocks_for(sequence.num_computed_tokens + num_scheduled, self._block_size) - len(sequence.blocks[0])
        if missing <= 0:
            return True
        new = self._pool.allocate([missing] * self._pool.num_groups)
        if new is None:
            return False
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, sequence.slot, len(blocks), new[group])
            blocks.extend(new[group])
        return True

    def missing_at_most(self, group: int, sequence: Sequence, num_tokens: int) -> int:
        """Return the blocks that a sequence adds in a group until it has `num_tokens`; windows return some."""
        end, held = blocks_for(num_tokens, self._block_size), sequence.blocks[group]
        most = self._firsts.most_blocks(group, end * self._block_size, self._step_tokens)
        return max(0, min(end - len(held), most - self.num_held(group, sequence)))

    def num_held(self, group: int, sequence: Sequence) -> int:
        """Return the blocks that a sequence holds in a group, shared ones included."""
        return len(sequence.blocks[group]) - sequence.first_blocks[group]

    def num_won(self, sequences: Items[Sequence]) -> list[int]:
        """Return, per group, the blocks that would be free if these sequences gave back theirs."""
        return [
            self._pool.num_freed(
                group, [block for item in sequences for block in item.blocks[group][item.first_blocks[group] :]]
            )
            for group in range(self._pool.num_groups)
        ]

    def num_wasted_slots(self, group: int, sequence: Sequence) -> int:
        """Return the slots of a sequence's blocks that hold no token, or one that its window has left."""
        end = len(sequence.blocks[group]) * self._block_size
        first = sequence.first_blocks[group] * self._block_size
        unseen = self._firsts.first_token(group, sequence.num_computed_tokens) - first
        return max(0, end - sequence.num_tokens) + max(0, unseen)

    def advance(self, sequence: Sequence) -> None:
        """After a step: publish the blocks that have become whole, release those that a window has left."""
        if sequence.num_computed_tokens < sequence.next_event_tokens:
            return
        count = sequence.num_computed_tokens // self._block_size
        if count > sequence.num_published_blocks:
            self._publish_from(sequence, count, [0] * self._pool.num_groups)
        self._leave_window(sequence)
        self._expect(sequence)

    def _expect(self, sequence: Sequence) -> None:
        """Note when blocks change next: a decode step that changes none costs one comparison."""
        changes = [self._firsts.leaves_at(group, sequence.first_blocks[group]) for group in self._window_groups]
        sequence.next_event_tokens = min([(sequence.num_published_blocks + 1) * self._block_size, *changes])

    def publish_arrived(self, sequence: Sequence) -> None:
        """The same for a sequence whose KV has arrived: where a window begins, its first block came in part only."""
        computed = sequence.num_computed_tokens
        whole = [self._firsts.whole_at_token(group, computed) for group in range(self._pool.num_groups)]
        self._publish_from(sequence, computed // self._block_size, whole)
        self._leave_window(sequence)
        self._expect(sequence)

    def _publish_from(self, sequence: Sequence, count: int, first_whole: Counts) -> None:
        if not self._has_prefix_cache:
            sequence.num_published_blocks = count
            return
        names = sequence.names(sequence.num_computed_tokens, self._block_size)
        for number in range(sequence.num_published_blocks, count):
            for group, blocks in enumerate(sequence.blocks):
                if number >= first_whole[group] and blocks[number] != NO_BLOCK:
                    self._pool.publish(group, blocks[number], names[number])
                    if self._host is not None:
                        self._host.save(group, blocks[number], names[number])
        sequence.num_published_blocks = count

    def _leave_window(self, sequence: Sequence) -> None:
        """Release the blocks that no later token of the sequence sees."""
        for group in self._window_groups:
            held, first = sequence.first_blocks[group], self._firsts.kept_at(group, sequence.num_computed_tokens)
            if first > held:
                blocks = sequence.blocks[group]
                self._pool.release(group, blocks[held:first])
                blocks[held:first] = [NO_BLOCK] * (first - held)
                sequence.first_blocks[group] = first

    def give_back(self, sequence: Sequence) -> None:
        """Release everything; the sequence has computed nothing then."""
        for group, blocks in enumerate(sequence.blocks):
            self._pool.release(group, blocks)
            blocks.clear()
            sequence.first_blocks[group] = 0
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.next_event_tokens = 0

    def validate(self, sequence: Sequence) -> None:
        """Check that a running sequence holds a block for every token that is seen, and no other."""
        enough = blocks_for(sequence.num_computed_tokens, self._block_size)
        for group, blocks in enumerate(sequence.blocks):
            first = self._firsts.at_token(group, sequence.num_computed_tokens)
            assert len(blocks) >= enough, f"group {group}: KV without a block"
            assert NO_BLOCK not in blocks[first:], f"group {group}: a token that is seen has no block"
            kept = self._firsts.kept_at(group, sequence.num_computed_tokens)
            assert kept <= sequence.first_blocks[group] <= first, f"group {group}: a block that nobody sees is held"
