"""What the KV of a worker looks like, which parts of it travel, and which pairs of workers can exchange it."""

from dataclasses import dataclass
from enum import StrEnum

_INT8_SCALE_BYTES = 4
MAX_TP_SIZE = 1024


class KVDtype(StrEnum):
    """How keys and values are held."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    """e4m3, without scales."""

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of a *row*: one head's key or value of one token, with its scale if it has one."""
        match self:
            case KVDtype.FLOAT32:
                return 4 * head_dim
            case KVDtype.FLOAT16 | KVDtype.BFLOAT16:
                return 2 * head_dim
            case KVDtype.FLOAT8:
                return head_dim
            case KVDtype.INT8:
                # The scale lies at a multiple of its size, the row ends at a multiple of 8.
                return -(-(-(-head_dim // _INT8_SCALE_BYTES) * _INT8_SCALE_BYTES + _INT8_SCALE_BYTES) // 8) * 8


CONVERTED = frozenset({KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.INT8})
"""Dtypes that the hand-off converts into each other; others move between workers that hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Layers that share a window and block tables; window 0 sees everything."""

    window: int
    layers: tuple[int, ...]

    def first_needed(self, num_tokens: int) -> int:
        """Return the first token that the query at position `num_tokens` still sees."""
        return max(0, num_tokens - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of a worker over all its tensor-parallel ranks.

    A rank holds an equal share of the KV heads; with fewer heads than ranks, each head is held by several ranks.
    """

    model_digest: str
    kv_dtype: str
    """The name of a KVDtype; of a peer, whatever it sent."""
    block_size: int
    num_kv_heads: int
    """Of the model, each counted once."""
    head_dim: int
    groups: tuple[GroupLayout, ...]
    tp_size: int = 1
    """Ranks."""

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's key or value of one token."""
        return KVDtype(self.kv_dtype).row_bytes(self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: keys and values of every head, each counted once."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def rank_token_bytes(self) -> int:
        """Bytes of one token in one layer on one rank."""
        return 2 * max(1, self.num_kv_heads // self.tp_size) * self.row_bytes

    def heads_of(self, rank: int) -> tuple[int, int]:
        """Return the KV heads of a rank: the first, and one past the last."""
        if self.tp_size <= self.num_kv_heads:
            share = self.num_kv_heads // self.tp_size
            return rank * share, (rank + 1) * share
        head = rank // (self.tp_size // self.num_kv_heads)
        return head, head + 1

    def ranks_of(self, head: int) -> range:
        """Return the ranks that hold a KV head."""
        if self.tp_size <= self.num_kv_heads:
            rank = head // (self.num_kv_heads // self.tp_size)
            return range(rank, rank + 1)
        copies = self.tp_size // self.num_kv_heads
        return range(head * copies, (head + 1) * copies)

    def refusal(self, peer: "KVLayout") -> str | None:
        """Return why KV cannot move between the two: the first field that stands in the way, with both values.

        Block size, KV dtype and tensor-parallel size may differ: gather and scatter convert.
        """
        for name in ("model_digest", "num_kv_heads", "head_dim", "groups"):
            mine, theirs = getattr(self, name), getattr(peer, name)
            if mine != theirs:
                return f"{name}: {mine!r} here, {theirs!r} there"
        if peer.kv_dtype not in list(KVDtype):
            return f"kv_dtype: {peer.kv_dtype!r} there, {', '.join(KVDtype)} are known here"
        if peer.kv_dtype != self.kv_dtype and not {KVDtype(peer.kv_dtype), KVDtype(self.kv_dtype)} <= CONVERTED:
            return f"kv_dtype: {str(self.kv_dtype)!r} here, {str(peer.kv_dtype)!r} there, which are not converted"
        if peer.block_size < 1:
            return f"block_size: {peer.block_size} there"
        if not 1 <= peer.tp_size <= MAX_TP_SIZE:
            return f"tp_size: {peer.tp_size} there, at most {MAX_TP_SIZE} are possible"
        if peer.num_kv_heads % peer.tp_size and peer.tp_size % peer.num_kv_heads:
            return f"tp_size: {peer.tp_size} there, which does not divide {peer.num_kv_heads} KV heads, nor they it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Which KV a chunk carries. Layers are places in the group's list, not layer numbers; ranges end before `end_*`."""

    group: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    first_token: int
    end_token: int

    @property
    def num_layers(self) -> int:
        """Layers of the chunk."""
        return self.end_layer - self.first_layer

    @property
    def num_heads(self) -> int:
        """KV heads of the chunk."""
        return self.end_head - self.first_head

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end_token - self.first_token

    def is_within(self, layout: KVLayout, num_tokens: int) -> bool:
        """True if the range exists in the layout, for a request of `num_tokens`. For ranges that came from a peer."""
        if not 0 <= self.group < len(layout.groups):
            return False
        num_layers = len(layout.groups[self.group].layers)
        return (
            0 <= self.first_layer < self.end_layer <= num_layers
            and 0 <= self.first_head < self.end_head <= layout.num_kv_heads
            and 0 <= self.first_token < self.end_token <= num_tokens
        )
