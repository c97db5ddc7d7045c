"""Copies between KV blocks and chunk bodies, with the checksum computed in the same pass.

A body is layer, K/V, token, head, dimension. The checksum is Σ mix(pair_i, i) mod 2^64 over pairs of 32-bit words (one
from each half of a row), so its parts may be summed in any order. mix is the pair product of UMAC's NH hash (Krovetz
2000) with keys that follow from the pair's place: (low + k_i)(high + l_i), each sum mod 2^32. Kernels release the GIL
and are not parallel: transport threads call them beside the engine's.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.kvtransfer.layout import ChunkRange, chunk_bytes
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.store import KVStore

UInt32 = NDArray[np.uint32]


@numba.njit(nogil=True, inline="always")
def _copy_row(source, into, place, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # Copies a row of 32-bit words; returns its part of the checksum. `place` is the row's first word in the body.
    size = source.shape[0]
    half = size // 2
    low_salt = np.uint32(np.uint32(place) * np.uint32(0x9E3779B1))
    high_salt = np.uint32(np.uint32(place) * np.uint32(0x85EBCA6B))
    total = np.uint64(0)
    for d in range(half):
        low, high = source[d], source[half + d]
        into[d] = low
        into[half + d] = high
        left = np.uint32(low + np.uint32(keys[0, d] + low_salt))
        right = np.uint32(high + np.uint32(keys[1, d] + high_salt))
        total += np.uint64(left) * np.uint64(right)
    if size % 2:
        low = source[size - 1]
        into[size - 1] = low
        left = np.uint32(low + np.uint32(keys[0, half] + low_salt))
        total += np.uint64(left) * np.uint64(np.uint32(keys[1, half] + high_salt))
    return total


@numba.njit(nogil=True, cache=True)
def _gather(kv, blocks, first, end, body, offset, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # kv [N, 2, H, B, W] and body [...] are 32-bit words; returns the checksum of the words written from `offset` on.
    num_heads, block_size, size = kv.shape[2], kv.shape[3], kv.shape[4]
    total = np.uint64(0)
    at = offset
    for side in range(2):
        for token in range(first, end):
            block = blocks[token // block_size]
            for head in range(num_heads):
                row = kv[block, side, head, token % block_size]
                total += _copy_row(row, body[at : at + size], at, keys)
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
                total += _copy_row(body[at : at + size], row, at, keys)
                at += size
    return total


def _draw_keys(size: int) -> UInt32:
    """Return the keys of a row's word pairs, [2, ceil(size / 2)]; the same in every process."""
    places = np.arange(2 * -(-size // 2), dtype=np.uint64).reshape(2, -1)
    with np.errstate(over="ignore"):
        mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(32)).astype(np.uint32)


def _words(layer: torch.Tensor) -> UInt32:
    """View a layer's KV as 32-bit words, [N, 2, H, B, W]."""
    words: UInt32 = layer.numpy().view(np.uint32)
    return words


class BlockCopier:
    """Gathers from, and scatters into, the blocks of one KV store on CPU."""

    def __init__(self, store: KVStore) -> None:
        self._layout: KVLayout = store.layout
        self._keys = _draw_keys(store.layout.token_bytes // (2 * store.layout.num_kv_heads * 4))
        self._layers = [_words(store.layer(index)) for index in range(store.layout.num_layers)]

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""
        return self._layout

    def gather(self, chunk: ChunkRange, blocks: Int32, body: memoryview) -> int:
        """Copy the chunk's KV into `body`; return its checksum. `blocks` is the request's table in that group."""
        words = np.frombuffer(body, np.uint32)
        total, offset = 0, 0
        for layer in self._layers_of(chunk):
            total += int(_gather(layer, blocks, chunk.first_token, chunk.end_token, words, offset, self._keys))
            offset += self._layer_words(chunk)
        return total % 2**64

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview) -> int:
        """Copy `body` into the chunk's blocks; return its checksum."""
        words = np.frombuffer(body, np.uint32)
        total, offset = 0, 0
        for layer in self._layers_of(chunk):
            total += int(_scatter(layer, blocks, chunk.first_token, chunk.end_token, words, offset, self._keys))
            offset += self._layer_words(chunk)
        return total % 2**64

    def warm_up(self) -> None:
        """Compile the kernels, by copying nothing: so that the first transfer does not wait."""
        blocks, words = np.zeros(1, np.int32), np.zeros(1, np.uint32)
        _gather(self._layers[0], blocks, 0, 0, words, 0, self._keys)
        words.flags.writeable = False
        _scatter(self._layers[0], blocks, 0, 0, words, 0, self._keys)

    def _layers_of(self, chunk: ChunkRange) -> Sequence[UInt32]:
        numbers = self._layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        return [self._layers[number] for number in numbers]

    def _layer_words(self, chunk: ChunkRange) -> int:
        return chunk_bytes(self._layout, chunk) // chunk.num_layers // 4
