"""Integer arithmetic of KV layouts: which rank sends what to which, in which chunks, and what the sink holds.

Pure; no torch. A *stream* is what one source rank sends to one sink rank: some KV heads, in a dtype both sides know. A
*chunk* is (KV group, layers of that group, heads of its stream, tokens). Its body is contiguous, in the order layer,
K/V, token, head, dimension, and fits one slot. A group with a window sends only the tokens that a later query can see.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype, KVLayout

LAYER_SHARE = 6
"""A chunk spans at most a sixth of the layers, so that most bytes leave before the forward pass ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one source rank sends to one sink rank."""

    source_rank: int
    sink_rank: int
    first_head: int
    end_head: int
    """KV heads [first_head, end_head), as the model counts them."""
    wire_dtype: KVDtype
    row_bytes: int
    """Of the wire dtype."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return 2 * (self.end_head - self.first_head) * self.row_bytes


def plan_streams(source: KVLayout, sink: KVLayout) -> tuple[Stream, ...]:
    """Return the streams of a pair, in an order that both sides compute alike: a stream's number is its place.

    A head that several sink ranks hold goes to each of them; of several source ranks that hold it, one sends it, chosen
    by the sink rank so that they share the work. The wire dtype is the one with the smaller rows.
    """
    wire_dtype = min((KVDtype(source.kv_dtype), KVDtype(sink.kv_dtype)), key=lambda kind: kind.row_bytes(sink.head_dim))
    streams = []
    for sink_rank in range(sink.tp_size):
        first, end = sink.heads_of(sink_rank)
        while first < end:
            holders = source.ranks_of(first)
            source_rank = holders[sink_rank % len(holders)]
            end_sent = min(end, source.heads_of(source_rank)[1])
            streams.append(
                Stream(
                    source_rank=source_rank,
                    sink_rank=sink_rank,
                    first_head=first,
                    end_head=end_sent,
                    wire_dtype=wire_dtype,
                    row_bytes=wire_dtype.row_bytes(sink.head_dim),
                )
            )
            first = end_sent
    return tuple(streams)


def chunk_bytes(stream: Stream, chunk: ChunkRange) -> int:
    """Return the length of a chunk's body."""
    return chunk.num_layers * chunk.num_tokens * stream.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """Layers of one group that travel together; complete when the model's layer `last_layer` has written its KV."""

    group: int
    first: int
    end: int
    last_layer: int
    max_tokens: int
    """Tokens of these layers that fit one slot."""


def layer_spans(layout: KVLayout, stream: Stream, slot_bytes: int) -> tuple[LayerSpan, ...]:
    """Split each group's layers into spans, in the order in which the forward pass completes them.

    Raises ValueError if a slot does not hold one token of one layer.
    """
    if slot_bytes < stream.token_bytes:
        raise ValueError(f"a slot of {slot_bytes} bytes does not hold one token of one layer ({stream.token_bytes})")
    most = min(-(-layout.num_layers // LAYER_SHARE), slot_bytes // stream.token_bytes)
    spans = []
    for number, group in enumerate(layout.groups):
        for first in range(0, len(group.layers), most):
            end = min(first + most, len(group.layers))
            spans.append(
                LayerSpan(
                    group=number,
                    first=first,
                    end=end,
                    last_layer=group.layers[end - 1],
                    max_tokens=slot_bytes // ((end - first) * stream.token_bytes),
                )
            )
    return tuple(sorted(spans, key=lambda span: span.last_layer))


def first_sent(layout: KVLayout, group: int, num_tokens: int, num_held: int) -> int:
    """Return the first token of a group that is sent for a request of `num_tokens`, `num_held` being at the sink.

    What the last token itself sees: the sink may compute that one again, to sample from it once more.
    """
    return max(num_held, layout.groups[group].first_needed(num_tokens - 1))


def chunks_of(stream: Stream, span: LayerSpan, first_token: int, end_token: int) -> Iterator[ChunkRange]:
    """Split tokens of a span into chunks that fit a slot."""
    for first in range(first_token, end_token, span.max_tokens):
        yield ChunkRange(
            group=span.group,
            first_layer=span.first,
            end_layer=span.end,
            first_head=stream.first_head,
            end_head=stream.end_head,
            first_token=first,
            end_token=min(first + span.max_tokens, end_token),
        )


_Key = tuple[int, int, int, int]
"""Rank, group, layer, head."""


class Coverage:
    """Which tokens of which heads and layers have been verified, at which rank of the sink."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._ranges: dict[_Key, list[tuple[int, int]]] = {
            (rank, group, layer, head): []
            for rank in range(layout.tp_size)
            for group, spec in enumerate(layout.groups)
            for layer in range(len(spec.layers))
            for head in range(*layout.heads_of(rank))
        }

    def add(self, rank: int, chunk: ChunkRange) -> None:
        """Count a verified chunk in."""
        for key in _keys(rank, chunk):
            self._ranges[key].append((chunk.first_token, chunk.end_token))

    def add_prefix(self, num_tokens: int) -> None:
        """The first `num_tokens` are held, in groups with a window those that their successor sees."""
        for key, ranges in self._ranges.items():
            first = self._layout.groups[key[1]].first_needed(num_tokens)
            if first < num_tokens:
                ranges.append((first, num_tokens))

    def remove(self, rank: int, chunk: ChunkRange) -> None:
        """The chunk's tokens hold nothing that can be trusted any more: a damaged body was copied over them."""
        for key in _keys(rank, chunk):
            self._ranges[key] = [
                part
                for first, end in self._ranges[key]
                for part in ((first, min(end, chunk.first_token)), (max(first, chunk.end_token), end))
                if part[0] < part[1]
            ]

    def is_complete(self, num_tokens: int) -> bool:
        """True if every layer holds what the last of `num_tokens`, and every later one, sees."""
        return self._holds(num_tokens, num_tokens - 1)

    def num_held(self, num_tokens: int) -> int:
        """Return num_tokens_held for the next source of a request of `num_tokens`: whole blocks verified everywhere.

        Groups with a window count from the first token that is sent for `num_tokens`.
        """
        return self._whole_blocks(min(self._end(key, num_tokens - 1) for key in self._ranges))

    def num_usable(self, num_tokens: int) -> int:
        """Return how many leading tokens need no computing: held, and with the windows that their successor sees.

        At most all but the last token: its hidden state is needed to go on.
        """
        if self.is_complete(num_tokens):
            return num_tokens - 1
        last = self._whole_blocks(min(self._unbroken_end(), num_tokens - 1))
        return next((end for end in range(last, 0, -self._layout.block_size) if self._holds(end, end)), 0)

    def _unbroken_end(self) -> int:
        """Return how far groups without a window hold everything from the beginning."""
        ends = [_reach(ranges, 0) for key, ranges in self._ranges.items() if not self._layout.groups[key[1]].window]
        latest = max((end for ranges in self._ranges.values() for _, end in ranges), default=0)
        return min(ends, default=latest)

    def _whole_blocks(self, count: int) -> int:
        return count // self._layout.block_size * self._layout.block_size

    def _holds(self, end: int, num_tokens: int) -> bool:
        return all(self._end(key, num_tokens) >= end for key in self._ranges)

    def _end(self, key: _Key, num_tokens: int) -> int:
        return _reach(self._ranges[key], self._layout.groups[key[1]].first_needed(num_tokens))


def _keys(rank: int, chunk: ChunkRange) -> Iterator[_Key]:
    for layer in range(chunk.first_layer, chunk.end_layer):
        for head in range(chunk.first_head, chunk.end_head):
            yield rank, chunk.group, layer, head


def _reach(ranges: Iterable[tuple[int, int]], start: int) -> int:
    """Return how far the ranges cover without a gap from `start`."""
    reached = start
    for first, end in sorted(ranges):
        if first > reached:
            break
        reached = max(reached, end)
    return reached
