"""What the KV of a worker looks like. Two workers exchange KV only if their layouts are equal."""

from dataclasses import dataclass, fields
from enum import StrEnum


class KVDtype(StrEnum):
    """How keys and values are held."""

    FLOAT32 = "float32"
    INT8 = "int8"


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
    """What two workers must agree on before KV can move between them. Compared field by field at HELLO."""

    model_digest: str
    kv_dtype: str
    """The name of a KVDtype; of a peer, whatever it sent."""
    row_bytes: int
    """One head's key or value of one token, with its scale if it has one."""
    block_size: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[GroupLayout, ...]

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: keys and values of every head."""
        return 2 * self.num_kv_heads * self.row_bytes

    def difference(self, other: "KVLayout") -> str | None:
        """Return the first field that differs, with both values; None if there is none."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine!r} here, {theirs!r} there"
        return None
