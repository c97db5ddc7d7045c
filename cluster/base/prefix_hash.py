"""The names of cached prefixes: a hash chain over units of 16 tokens, equal in every process of a cluster.

    h_0 = H(model digest, KV dtype, numerics digest, adapter, salt)        h_i = H(h_{i-1}, tokens of unit i)

H is blake2b with 128 bits, so a chain names its whole prefix and everything else that its KV depends on; two prefixes
never share a name. A KV block is named by the chain at its last unit: the block size is a multiple of a unit.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

UNIT_TOKENS = 16
NAME_BYTES = 16

PrefixHash = bytes
"""Names a prefix; 16 bytes."""


class TokenArray(Protocol):
    """A numpy array of int32 token ids, [T]."""

    def __getitem__(self, part: slice) -> "TokenArray":
        """Return a part."""

    def tobytes(self) -> bytes:
        """Return its little-endian bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixIdentity:
    """What the KV of a worker depends on besides the tokens."""

    model_digest: str
    kv_dtype: str
    numerics_digest: str

    def root(self, *, adapter: str = "", salt: str = "") -> PrefixHash:
        """Return h_0: prefixes under another adapter or salt have other names."""
        state = blake2b(digest_size=NAME_BYTES)
        for part in (self.model_digest, self.kv_dtype, self.numerics_digest, adapter, salt):
            content = part.encode()
            state.update(len(content).to_bytes(8, "little") + content)
        return state.digest()


def extend_chain(
    chain: list[PrefixHash], root: PrefixHash, token_ids: TokenArray, num_tokens: int, block_size: int
) -> None:
    """Append the names of the whole blocks of token_ids[:num_tokens] that `chain` does not have yet."""
    parent = chain[-1] if chain else root
    for block in range(len(chain), num_tokens // block_size):
        for start in range(block * block_size, (block + 1) * block_size, UNIT_TOKENS):
            unit = token_ids[start : start + UNIT_TOKENS].tobytes()
            parent = blake2b(parent + unit, digest_size=NAME_BYTES).digest()
        chain.append(parent)


def unit_chain(identity: PrefixIdentity, token_ids: Sequence[int], *, salt: str = "") -> bytes:
    """Return the names of the whole units of a prompt, one after the other."""
    data = array("i", token_ids).tobytes()
    size = UNIT_TOKENS * 4
    parent, names = identity.root(salt=salt), []
    for start in range(0, len(data) - size + 1, size):
        parent = blake2b(parent + data[start : start + size], digest_size=NAME_BYTES).digest()
        names.append(parent)
    return b"".join(names)


def split_names(names: bytes) -> Iterator[PrefixHash]:
    """Yield the names that lie one after the other."""
    return iter([names[start : start + NAME_BYTES] for start in range(0, len(names), NAME_BYTES)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """One change of what a worker's prefix cache holds."""

    sequence_no: int
    group: int
    name: PrefixHash
    is_stored: bool
    """False: it was evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents:
    """Changes in order, or everything that is held.

    If `is_snapshot`, whoever reads forgets what it knew; `events` then holds what is stored. `next_no` is the number to
    ask from next time.
    """

    events: Sequence[CacheEvent]
    next_no: int
    is_snapshot: bool
