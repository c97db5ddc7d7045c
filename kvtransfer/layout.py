"""Integer arithmetic of KV layouts: which bytes make up a chunk, which chunks a prefill sends, what the sink holds.

Pure; no torch. A *chunk* is (KV group, layers of that group, tokens). Its body is contiguous, in the order layer, K/V,
token, head, dimension, and fits one slot. A group with a window sends only the tokens that a later query can see.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdserve.cluster.base.kv_layout import KVLayout

LAYER_SHARE = 6
"""A chunk spans at most a sixth of the layers, so that most bytes leave before the forward pass ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Which KV a chunk carries. Layers are places in the group's list, not layer numbers; ranges end before `end_*`."""

    group: int
    first_layer: int
    end_layer: int
    first_token: int
    end_token: int

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return self.end_layer - self.first_layer

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end_token - self.first_token

    def is_within(self, layout: KVLayout, num_tokens: int) -> bool:
        """True if the range exists in the layout, for a request of `num_tokens`. For ranges that came from a peer."""
        if not 0 <= self.group < len(layout.groups):
            return False
        num_layers = len(layout.groups[self.group].layers)
        return 0 <= self.first_layer < self.end_layer <= num_layers and (
            0 <= self.first_token < self.end_token <= num_tokens
        )


def chunk_bytes(layout: KVLayout, chunk: ChunkRange) -> int:
    """Return the length of a chunk's body."""
    return chunk.num_layers * chunk.num_tokens * layout.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """Layers of one group that travel together; complete when the model's layer `last_layer` has written its KV."""

    group: int
    first: int
    end: int
    last_layer: int
    max_tokens: int
    """Tokens of these layers that fit one slot."""


def layer_spans(layout: KVLayout, slot_bytes: int) -> tuple[LayerSpan, ...]:
    """Split each group's layers into spans, in the order in which the forward pass completes them.

    Raises ValueError if a slot does not hold one token of one layer.
    """
    if slot_bytes < layout.token_bytes:
        raise ValueError(f"a slot of {slot_bytes} bytes does not hold one token of one layer ({layout.token_bytes})")
    most = min(-(-layout.num_layers // LAYER_SHARE), slot_bytes // layout.token_bytes)
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
                    max_tokens=slot_bytes // ((end - first) * layout.token_bytes),
                )
            )
    return tuple(sorted(spans, key=lambda span: span.last_layer))


def first_sent(layout: KVLayout, group: int, num_tokens: int, num_held: int) -> int:
    """Return the first token of a group that is sent for a request of `num_tokens`, `num_held` being at the sink.

    What the last token itself sees: the sink may compute that one again, to sample from it once more.
    """
    return max(num_held, layout.groups[group].first_needed(num_tokens - 1))


def chunks_of(span: LayerSpan, first_token: int, end_token: int) -> Iterator[ChunkRange]:
    """Split tokens of a span into chunks that fit a slot."""
    for first in range(first_token, end_token, span.max_tokens):
        yield ChunkRange(
            group=span.group,
            first_layer=span.first,
            end_layer=span.end,
            first_token=first,
            end_token=min(first + span.max_tokens, end_token),
        )


class Coverage:
    """Which tokens of which layers have been verified at the sink."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {
            (group, layer): [] for group, spec in enumerate(layout.groups) for layer in range(len(spec.layers))
        }

    def add(self, chunk: ChunkRange) -> None:
        """Count a verified chunk in."""
        for layer in range(chunk.first_layer, chunk.end_layer):
            self._ranges[chunk.group, layer].append((chunk.first_token, chunk.end_token))

    def add_prefix(self, num_tokens: int) -> None:
        """The first `num_tokens` are held, in groups with a window those that their successor sees."""
        for number, group in enumerate(self._layout.groups):
            first = group.first_needed(num_tokens)
            if first < num_tokens:
                for layer in range(len(group.layers)):
                    self._ranges[number, layer].append((first, num_tokens))

    def remove(self, chunk: ChunkRange) -> None:
        """The chunk's tokens hold nothing that can be trusted any more: a damaged body was copied over them."""
        for layer in range(chunk.first_layer, chunk.end_layer):
            ranges = self._ranges[chunk.group, layer]
            self._ranges[chunk.group, layer] = [
                part
                for first, end in ranges
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
        ends = [
            _reach(ranges, 0) for (group, _), ranges in self._ranges.items() if not self._layout.groups[group].window
        ]
        latest = max((end for ranges in self._ranges.values() for _, end in ranges), default=0)
        return min(ends, default=latest)

    def _whole_blocks(self, count: int) -> int:
        return count // self._layout.block_size * self._layout.block_size

    def _holds(self, end: int, num_tokens: int) -> bool:
        return all(
            _reach(ranges, self._layout.groups[group].first_needed(num_tokens)) >= end
            for (group, _), ranges in self._ranges.items()
        )

    def _end(self, key: tuple[int, int], num_tokens: int) -> int:
        return _reach(self._ranges[key], self._layout.groups[key[0]].first_needed(num_tokens))


def _reach(ranges: Iterable[tuple[int, int]], start: int) -> int:
    """Return how far the ranges cover without a gap from `start`."""
    reached = start
    for first, end in sorted(ranges):
        if first > reached:
            break
        reached = max(reached, end)
    return reached
