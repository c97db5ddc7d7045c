"""Where a transfer's chunks go at a rank of the sink: blocks of its own store."""

from collections.abc import Sequence

import numpy as np

from pdserve.cluster.base.kv_layout import ChunkRange
from pdserve.kvtransfer.layout import Stream, chunk_bytes
from pdserve.workers.engine.block_pool import NO_BLOCK
from pdserve.workers.kv.copy import Copier


class BlockTarget:
    """Where a transfer's chunks go: blocks of this rank's store. See ScatterTarget."""

    def __init__(
        self,
        copier: Copier,
        streams: Sequence[Stream],
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        num_cached_tokens: int,
    ) -> None:
        """`streams` are those of the pair; `num_cached_tokens` are held, in blocks that other requests may read."""
        self._copier = copier
        self._streams = streams
        self._blocks = [np.array(held, np.int32) for held in blocks]
        self._num_tokens = num_tokens
        self._num_cached_tokens = num_cached_tokens

    def refuse(self, stream_no: int, chunk: ChunkRange, num_bytes: int) -> str | None:
        """See ScatterTarget."""
        layout, stream = self._copier.layout, self._streams[stream_no]
        if not chunk.is_within(layout, self._num_tokens):
            return f"{chunk} is not part of a prompt of {self._num_tokens} tokens"
        if (chunk.first_head, chunk.end_head) != (stream.first_head, stream.end_head):
            return f"{chunk} is not of the heads of its stream, {stream}"
        first = chunk.first_token // layout.block_size
        if chunk.first_token < self._num_cached_tokens or self._blocks[chunk.group][first] == NO_BLOCK:
            return f"{chunk} begins before what this worker asked for"
        expected = chunk_bytes(stream, chunk)
        return None if num_bytes == expected else f"{num_bytes} bytes for {chunk}, {expected} expected"

    def scatter(self, stream_no: int, chunk: ChunkRange, body: memoryview) -> int:
        """See ScatterTarget."""
        return self._copier.scatter(chunk, self._blocks[chunk.group], body, self._streams[stream_no].wire_dtype)
