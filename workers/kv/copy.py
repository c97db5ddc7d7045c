"""Copies between KV blocks and chunk bodies, with the checksum computed in the same pass.

A body is layer, K/V, token, head, dimension, in the wire dtype of its stream; where that is not the store's, rows are
converted on the way, by torch, in pieces that it computes on the calling thread. The checksum is Σ mix(word_i + key_i)
mod 2^64 over 64-bit words, so its parts may be summed in any order. mix multiplies the halves of its argument, as
UMAC's NH hash does (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999); keys follow from the word's place. Kernels release
the GIL and are not parallel: transport threads call them beside the engine's.
"""

from collections.abc import Iterator, Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype, KVLayout
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.rows import TORCH_DTYPES, decode_rows, encode_rows
from pdserve.workers.kv.store import KVStore

UInt64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SERIAL_VALUES = 1 << 15
_Piece = tuple[int, int, slice, tuple[torch.Tensor, slice, torch.Tensor]]
"""Layer of the chunk, layer of the model, tokens of the chunk, and where they lie: blocks, heads, offsets."""
_ROW_SALT = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(nogil=True, cache=True)
def _gather(kv, blocks, first, end, first_head, end_head, body, offset, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # kv [N, 2, H, B, W] and body [...] are 64-bit words; returns the checksum of the words written from `offset` on.
    # Rows are sliced before their loop: an index that might be negative would keep it from being vectorised.
    block_size, size = kv.shape[3], kv.shape[4]
    total = np.uint64(0)
    at = offset
    for side in range(2):
        for token in range(first, end):
            block = blocks[token // block_size]
            for head in range(first_head, end_head):
                row = kv[block, side, head, token % block_size]
                words = body[at : at + size]
                salt = np.uint64(at) * _ROW_SALT
                for d in range(size):
                    word = row[d]
                    words[d] = word
                    mixed = word + (keys[d] + salt)
                    total += (mixed & _LOW) * (mixed >> _HALF)
                at += size
    return total


@numba.njit(nogil=True, cache=True)
def _scatter(kv, blocks, first, end, first_head, end_head, body, offset, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    block_size, size = kv.shape[3], kv.shape[4]
    total = np.uint64(0)
    at = offset
    for side in range(2):
        for token in range(first, end):
            block = blocks[token // block_size]
            for head in range(first_head, end_head):
                row = kv[block, side, head, token % block_size]
                words = body[at : at + size]
                salt = np.uint64(at) * _ROW_SALT
                for d in range(size):
                    word = words[d]
                    row[d] = word
                    mixed = word + (keys[d] + salt)
                    total += (mixed & _LOW) * (mixed >> _HALF)
                at += size
    return total


@numba.njit(nogil=True, cache=True)
def _checksum(body, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # The same of a body that lies there, [rows * size] words.
    size = keys.shape[0]
    total = np.uint64(0)
    for at in range(0, body.shape[0], size):
        words = body[at : at + size]
        salt = np.uint64(at) * _ROW_SALT
        for d in range(size):
            mixed = words[d] + (keys[d] + salt)
            total += (mixed & _LOW) * (mixed >> _HALF)
    return total


def _draw_keys(size: int) -> UInt64:
    """Return the keys of a row's words, [size]; the same in every process."""
    with np.errstate(over="ignore"):
        keys = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        drawn: UInt64 = keys ^ (keys >> np.uint64(32))
        return drawn


def _words(layer: torch.Tensor) -> UInt64:
    """View a layer's KV as 64-bit words, [N, 2, H, B, W]."""
    words: UInt64 = layer.numpy().view(np.uint64)
    return words


class BlockCopier:
    """Gathers from, and scatters into, the blocks of one rank's KV store on CPU.

    Raises ConfigError for a KV that it cannot move.
    """

    def __init__(self, store: KVStore) -> None:
        self._layout: KVLayout = store.layout
        if store.layout.row_bytes % 8:
            raise ConfigError(f"KV cannot be moved: {store.layout.row_bytes} bytes per head are no multiple of 8")
        self._keys = _draw_keys(store.layout.row_bytes // 8)
        self._store = store
        self._kv_dtype = KVDtype(store.layout.kv_dtype)
        self._first_head, self._end_head = store.layout.heads_of(store.rank)
        self._keys_of: dict[KVDtype, UInt64] = {}
        self._layers = [_words(store.layer(index)) for index in range(store.layout.num_layers)]

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""
        return self._layout

    def holds(self, chunk: ChunkRange) -> bool:
        """True if the heads of the chunk are in this rank's store."""
        return self._first_head <= chunk.first_head and chunk.end_head <= self._end_head

    def gather(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """Copy the chunk's KV into `body`; return its checksum. `blocks` is the request's table in that group."""
        words = np.frombuffer(body, np.uint64)
        if wire_dtype != self._kv_dtype:
            self._encode(chunk, blocks, words, wire_dtype)
            return int(_checksum(words, self._wire_keys(wire_dtype)))
        total, offset, heads = 0, 0, self._heads_of(chunk)
        for layer in self._layers_of(chunk):
            total += int(_gather(layer, blocks, chunk.first_token, chunk.end_token, *heads, words, offset, self._keys))
            offset += len(words) // chunk.num_layers
        return total % 2**64

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """Copy `body` into the chunk's blocks; return its checksum."""
        words = np.frombuffer(body, np.uint64)
        if wire_dtype != self._kv_dtype:
            self._decode(chunk, blocks, words, wire_dtype)
            return int(_checksum(words, self._wire_keys(wire_dtype)))
        total, offset, heads = 0, 0, self._heads_of(chunk)
        for layer in self._layers_of(chunk):
            total += int(_scatter(layer, blocks, chunk.first_token, chunk.end_token, *heads, words, offset, self._keys))
            offset += len(words) // chunk.num_layers
        return total % 2**64

    def _wire_keys(self, wire_dtype: KVDtype) -> UInt64:
        if wire_dtype not in self._keys_of:
            self._keys_of[wire_dtype] = _draw_keys(wire_dtype.row_bytes(self._layout.head_dim) // 8)
        return self._keys_of[wire_dtype]

    def _encode(self, chunk: ChunkRange, blocks: Int32, words: UInt64, wire_dtype: KVDtype) -> None:
        target = self._as_rows(words, chunk, wire_dtype)
        for place, layer, tokens, (held, heads, offsets) in self._pieces(chunk, blocks):
            rows = self._store.layer(layer)[held, :, heads, offsets]  # [T, 2, H, row]
            values = decode_rows(rows, self._layout.head_dim)
            target[place, :, tokens] = encode_rows(values, wire_dtype).transpose(0, 1)

    def _decode(self, chunk: ChunkRange, blocks: Int32, words: UInt64, wire_dtype: KVDtype) -> None:
        # A slot may be mapped read-only, which torch does not know.
        source = self._as_rows(words.copy(), chunk, wire_dtype)
        for place, layer, tokens, (held, heads, offsets) in self._pieces(chunk, blocks):
            values = decode_rows(source[place, :, tokens].contiguous(), self._layout.head_dim)
            rows = encode_rows(values, self._kv_dtype).transpose(0, 1)
            self._store.layer(layer)[held, :, heads, offsets] = rows

    def _as_rows(self, words: UInt64, chunk: ChunkRange, wire_dtype: KVDtype) -> torch.Tensor:
        flat = torch.from_numpy(words.view(np.int8)).view(TORCH_DTYPES[wire_dtype])
        return flat.view(chunk.num_layers, 2, chunk.num_tokens, chunk.num_heads, -1)

    def _pieces(self, chunk: ChunkRange, blocks: Int32) -> "Iterator[_Piece]":
        """Cut a chunk into pieces below torch's threshold for more than one thread."""
        layout = self._layout
        count = max(1, _SERIAL_VALUES // (2 * chunk.num_heads * layout.head_dim))
        heads = slice(*self._heads_of(chunk))
        layers = layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        for first in range(chunk.first_token, chunk.end_token, count):
            places = np.arange(first, min(first + count, chunk.end_token))
            held = torch.from_numpy(blocks[places // layout.block_size]).long()
            offsets = torch.from_numpy(places % layout.block_size)
            start = first - chunk.first_token
            for place, layer in enumerate(layers):
                yield place, layer, slice(start, start + len(places)), (held, heads, offsets)

    def warm_up(self) -> None:
        """Compile the kernels, by copying nothing: so that the first transfer does not wait."""
        blocks, words = np.zeros(1, np.int32), np.zeros(1, np.uint64)
        _gather(self._layers[0], blocks, 0, 0, 0, 0, words, 0, self._keys)
        words.flags.writeable = False
        _scatter(self._layers[0], blocks, 0, 0, 0, 0, words, 0, self._keys)
        _checksum(words[:0], self._keys)

    def _layers_of(self, chunk: ChunkRange) -> Sequence[UInt64]:
        numbers = self._layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        return [self._layers[number] for number in numbers]

    def _heads_of(self, chunk: ChunkRange) -> tuple[int, int]:
        """Return the chunk's heads as places in the store."""
        return chunk.first_head - self._first_head, chunk.end_head - self._first_head
