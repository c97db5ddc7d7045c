"""Copies between KV blocks and chunk bodies, with the checksum computed in the same pass.

A body is layer, K/V, token, head, dimension. The checksum is Σ mix(word_i + key_i) mod 2^64 over 64-bit words, so its
parts may be summed in any order. mix multiplies the halves of its argument, as UMAC's NH hash does (Black, Halevi,
Krawczyk, Krovetz, Rogaway 1999); keys follow from the word's place. Kernels release the GIL
and are not parallel: transport threads call them beside the engine's.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.kvtransfer.layout import ChunkRange, chunk_bytes
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.store import KVStore

UInt64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROW_SALT = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(nogil=True, cache=True)
def _gather(kv, blocks, first, end, body, offset, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # kv [N, 2, H, B, W] and body [...] are 64-bit words; returns the checksum of the words written from `offset` on.
    # Rows are sliced before their loop: an index that might be negative would keep it from being vectorised.
    num_heads, block_size, size = kv.shape[2], kv.shape[3], kv.shape[4]
    total = np.uint64(0)
    at = offset
    for side in range(2):
        for token in range(first, end):
            block = blocks[token // block_size]
            for head in range(num_heads):
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
def _scatter(kv, blocks, first, end, body, offset, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    num_heads, block_size, size = kv.shape[2], kv.shape[3], kv.shape[4]
    total = np.uint64(0)
    at = offset
    for side in range(2):
        for token in range(first, end):
            block = blocks[token // block_size]
            for head in range(num_heads):
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
    """Gathers from, and scatters into, the blocks of one KV store on CPU.

    Raises ConfigError for a KV that it cannot move.
    """

    def __init__(self, store: KVStore) -> None:
        self._layout: KVLayout = store.layout
        if store.layout.row_bytes % 8:
            raise ConfigError(f"KV cannot be moved: {store.layout.row_bytes} bytes per head are no multiple of 8")
        self._keys = _draw_keys(store.layout.row_bytes // 8)
        self._layers = [_words(store.layer(index)) for index in range(store.layout.num_layers)]

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""
        return self._layout

    def gather(self, chunk: ChunkRange, blocks: Int32, body: memoryview) -> int:
        """Copy the chunk's KV into `body`; return its checksum. `blocks` is the request's table in that group."""
        words = np.frombuffer(body, np.uint64)
        total, offset = 0, 0
        for layer in self._layers_of(chunk):
            total += int(_gather(layer, blocks, chunk.first_token, chunk.end_token, words, offset, self._keys))
            offset += self._layer_words(chunk)
        return total % 2**64

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview) -> int:
        """Copy `body` into the chunk's blocks; return its checksum."""
        words = np.frombuffer(body, np.uint64)
        total, offset = 0, 0
        for layer in self._layers_of(chunk):
            total += int(_scatter(layer, blocks, chunk.first_token, chunk.end_token, words, offset, self._keys))
            offset += self._layer_words(chunk)
        return total % 2**64

    def warm_up(self) -> None:
        """Compile the kernels, by copying nothing: so that the first transfer does not wait."""
        blocks, words = np.zeros(1, np.int32), np.zeros(1, np.uint64)
        _gather(self._layers[0], blocks, 0, 0, words, 0, self._keys)
        words.flags.writeable = False
        _scatter(self._layers[0], blocks, 0, 0, words, 0, self._keys)

    def _layers_of(self, chunk: ChunkRange) -> Sequence[UInt64]:
        numbers = self._layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        return [self._layers[number] for number in numbers]

    def _layer_words(self, chunk: ChunkRange) -> int:
        return chunk_bytes(self._layout, chunk) // chunk.num_layers // 8
