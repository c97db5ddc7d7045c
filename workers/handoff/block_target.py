"""Where a transfer's chunks go at the sink: blocks of its own store."""

import numpy as np

from pdserve.kvtransfer.layout import ChunkRange, chunk_bytes
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists
from pdserve.workers.kv.copy import BlockCopier


class BlockTarget:
    """Where a transfer's chunks go: blocks of this worker's store. See ScatterTarget."""

    def __init__(self, copier: BlockCopier, blocks: BlockLists, num_tokens: int, *, num_cached_tokens: int) -> None:
        """`num_cached_tokens` are held already, in blocks that other requests may read."""
        self._copier = copier
        self._blocks = [np.array(held, np.int32) for held in blocks]
        self._num_tokens = num_tokens
        self._num_cached_tokens = num_cached_tokens

    def refuse(self, chunk: ChunkRange, num_bytes: int) -> str | None:
        """See ScatterTarget."""
        layout = self._copier.layout
        if not chunk.is_within(layout, self._num_tokens):
            return f"{chunk} is not part of a prompt of {self._num_tokens} tokens"
        first = chunk.first_token // layout.block_size
        if chunk.first_token < self._num_cached_tokens or self._blocks[chunk.group][first] == NO_BLOCK:
            return f"{chunk} begins before what this worker asked for"
        expected = chunk_bytes(layout, chunk)
        return None if num_bytes == expected else f"{num_bytes} bytes for {chunk}, {expected} expected"

    def scatter(self, chunk: ChunkRange, body: memoryview) -> int:
        """See ScatterTarget."""
        return self._copier.scatter(chunk, self._blocks[chunk.group], body)
