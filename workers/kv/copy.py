"""Copies between KV blocks and chunk bodies, with the checksum computed in the same pass.

A body is layer, K/V, token, head, dimension, in the wire dtype of its stream; where that is not the store's, rows are
converted on the way. The checksum is Σ mix(word_i + key_i)
mod 2^64 over 64-bit words, so its parts may be summed in any order. mix multiplies the halves of its argument, as
UMAC's NH hash does (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999); keys follow from the word's place. Kernels release
the GIL and are not parallel: transport threads call them beside the engine's.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype, KVLayout
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.row_kernels import FLOAT16, FLOAT32, INT8, read_row, write_row
from pdserve.workers.kv.store import KVStore

UInt64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_KINDS = {KVDtype.FLOAT32: FLOAT32, KVDtype.FLOAT16: FLOAT16, KVDtype.INT8: INT8}
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


@numba.njit(nogil=True, cache=True)
def _gather_converted(  # type: ignore[no-untyped-def]  # numba infers the types
    floats, halves, bytes_, to_floats, to_halves, to_bytes, blocks, first, end, first_head, end_head, held, wire, size
):
    # The first three are views of a layer [N, 2, H, B, row], the next three of its part of the body [2, T, heads, row].
    block_size = floats.shape[3]
    bits = np.empty(size, np.uint32)
    values = bits.view(np.float32)
    for side in range(2):
        for token in range(first, end):
            block, offset, place = blocks[token // block_size], token % block_size, token - first
            for head in range(first_head, end_head):
                at = head - first_head
                read_row(
                    held,
                    floats[block, side, head, offset],
                    halves[block, side, head, offset],
                    bytes_[block, side, head, offset],
                    bits,
                    values,
                )
                write_row(
                    wire,
                    values,
                    bits,
                    to_floats[side, place, at],
                    to_halves[side, place, at],
                    to_bytes[side, place, at],
                )


@numba.njit(nogil=True, cache=True)
def _scatter_converted(  # type: ignore[no-untyped-def]  # numba infers the types
    floats, halves, bytes_, of_floats, of_halves, of_bytes, blocks, first, end, first_head, end_head, held, wire, size
):
    block_size = floats.shape[3]
    bits = np.empty(size, np.uint32)
    values = bits.view(np.float32)
    for side in range(2):
        for token in range(first, end):
            block, offset, place = blocks[token // block_size], token % block_size, token - first
            for head in range(first_head, end_head):
                at = head - first_head
                read_row(
                    wire,
                    of_floats[side, place, at],
                    of_halves[side, place, at],
                    of_bytes[side, place, at],
                    bits,
                    values,
                )
                write_row(
                    held,
                    values,
                    bits,
                    floats[block, side, head, offset],
                    halves[block, side, head, offset],
                    bytes_[block, side, head, offset],
                )


def _views(rows: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.uint16], NDArray[np.int8]]:
    """Return rows [..., row] as fp32, halves and bytes."""
    return rows.view(np.float32), rows.view(np.uint16), rows.view(np.int8)


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
            self._move_converted(chunk, blocks, words, wire_dtype, is_gather=True)
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
            self._move_converted(chunk, blocks, words, wire_dtype, is_gather=False)
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

    def _move_converted(
        self, chunk: ChunkRange, blocks: Int32, words: UInt64, wire_dtype: KVDtype, *, is_gather: bool
    ) -> None:
        flat = words.view(np.int8)
        row_bytes = wire_dtype.row_bytes(self._layout.head_dim)
        body = flat.reshape(chunk.num_layers, 2, chunk.num_tokens, chunk.num_heads, row_bytes)
        tokens, heads = (chunk.first_token, chunk.end_token), self._heads_of(chunk)
        kinds = _KINDS[self._kv_dtype], _KINDS[wire_dtype]
        for layer, part in zip(self._layers_of(chunk), body, strict=True):
            convert = _gather_converted if is_gather else _scatter_converted
            convert(*_views(layer), *_views(part), blocks, *tokens, *heads, *kinds, self._layout.head_dim)

    def warm_up(self) -> None:
        """Compile the kernels, by copying nothing: so that no transfer waits, whatever its peer holds."""
        blocks, words = np.zeros(1, np.int32), np.zeros(1, np.uint64)
        layer, ends = self._layers[0], (0, 0, 0, 0)
        kinds = (_KINDS[self._kv_dtype], _KINDS[self._kv_dtype], self._layout.head_dim)
        body = np.zeros((2, 1, 1, 8), np.int8)
        _gather(layer, blocks, *ends, words, 0, self._keys)
        _gather_converted(*_views(layer), *_views(body), blocks, *ends, *kinds)
        _checksum(words[:0], self._keys)
        for is_writable in (True, False):  # a slot may be mapped read-only
            words.flags.writeable = body.flags.writeable = is_writable
            _scatter(layer, blocks, *ends, words, 0, self._keys)
            _scatter_converted(*_views(layer), *_views(body), blocks, *ends, *kinds)
            _checksum(words[:0], self._keys)

    def _layers_of(self, chunk: ChunkRange) -> Sequence[UInt64]:
        numbers = self._layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        return [self._layers[number] for number in numbers]

    def _heads_of(self, chunk: ChunkRange) -> tuple[int, int]:
        """Return the chunk's heads as places in the store."""
        return chunk.first_head - self._first_head, chunk.end_head - self._first_head
