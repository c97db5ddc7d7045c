"""The blocks of sequences: bound as a sequence grows, taken over from the prefix cache, published, given back.

Used by the scheduler on the engine thread. A sequence's `blocks` are by logical number, so equally long in every group.
"""

from pdserve.workers.engine.block_pool import NO_BLOCK, BlockPool, Counts
from pdserve.workers.engine.prefix_cache import FirstBlocks
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence, blocks_for


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
    ) -> None:
        """`step_tokens` are the most that one step adds to a sequence."""
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
        num_blocks = len(sequence.blocks[0])
        sequence.num_computed_tokens = num_blocks * self._block_size
        sequence.num_published_blocks = num_blocks
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            sequence.first_blocks[group] = self._firsts.at_block(group, num_blocks)
            self._tables.extend(group, sequence.slot, 0, blocks)

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

    def publish(self, sequence: Sequence) -> None:
        """Let the prefix cache serve the blocks that have become whole."""
        count = sequence.num_computed_tokens // self._block_size
        if count > sequence.num_published_blocks:
            self._publish_from(sequence, count, [0] * self._pool.num_groups)

    def publish_arrived(self, sequence: Sequence) -> None:
        """The same for a sequence whose KV has arrived: where a window begins, its first block came in part only."""
        computed = sequence.num_computed_tokens
        whole = [self._firsts.whole_at_token(group, computed) for group in range(self._pool.num_groups)]
        self._publish_from(sequence, computed // self._block_size, whole)

    def _publish_from(self, sequence: Sequence, count: int, first_whole: Counts) -> None:
        if not self._has_prefix_cache:
            return
        names = sequence.names(sequence.num_computed_tokens, self._block_size)
        for number in range(sequence.num_published_blocks, count):
            for group, blocks in enumerate(sequence.blocks):
                if number >= first_whole[group] and blocks[number] != NO_BLOCK:
                    self._pool.publish(group, blocks[number], names[number])
        sequence.num_published_blocks = count

    def leave_window(self, sequence: Sequence) -> None:
        """Release the blocks that no later token of the sequence sees."""
        for group in self._window_groups:
            held, first = sequence.first_blocks[group], self._firsts.at_token(group, sequence.num_computed_tokens)
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

    def validate(self, sequence: Sequence) -> None:
        """Check that a running sequence holds a block for every token that is seen, and no other."""
        enough = blocks_for(sequence.num_computed_tokens, self._block_size)
        for group, blocks in enumerate(sequence.blocks):
            first = self._firsts.at_token(group, sequence.num_computed_tokens)
            assert len(blocks) >= enough, f"group {group}: KV without a block"
            assert NO_BLOCK not in blocks[first:], f"group {group}: a token that is seen has no block"
            assert sequence.first_blocks[group] == first, f"group {group}: a block that nobody sees is held"
