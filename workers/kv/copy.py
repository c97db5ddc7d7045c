"""Copies between KV blocks and chunk bodies, with the checksum computed in the same pass.

A body is layer, K/V, token, head, dimension, in the wire dtype of its stream; where that is not the store's, rows are
converted on the way. The checksum is Σ mix(word_i + key_i)
mod 2^64 over 64-bit words, so its parts may be summed in any order. mix multiplies the halves of its argument, as
UMAC's NH hash does (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999); keys follow from the word's place. Kernels release
the GIL and are not parallel: transport threads call them beside the engine's.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import CONVERTED, ChunkRange, KVDtype, KVLayout
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.row_kernels import FLOAT16, FLOAT32, INT8, read_row, write_row
from pdserve.workers.kv.store import KVStore

UInt64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_Kernel = Callable[..., Any]
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


@numba.njit(nogil=True, cache=True)
def _copy_words(source, target, keys):  # type: ignore[no-untyped-def]  # numba infers the types
    # target = source, [rows * size] words; the checksum in the same pass.
    size = keys.shape[0]
    total = np.uint64(0)
    for at in range(0, source.shape[0], size):
        words, copied = source[at : at + size], target[at : at + size]
        salt = np.uint64(at) * _ROW_SALT
        for d in range(size):
            word = words[d]
            copied[d] = word
            mixed = word + (keys[d] + salt)
            total += (mixed & _LOW) * (mixed >> _HALF)
    return total


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


class BodyChecksum:
    """Copies whole bodies in host memory, with their checksum; for KV that is not in host memory itself."""

    def __init__(self, row_bytes: int) -> None:
        self._keys = _draw_keys(row_bytes // 8)

    def copy(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> int:
        """Copy a body, as bytes; return its checksum."""
        return int(_copy_words(source.view(np.uint64), target.view(np.uint64), self._keys))


class Copier(Protocol):
    """Copies between the blocks of one rank's KV store and chunk bodies; from any thread.

    `blocks` is a request's table in the chunk's group, int32 [blocks]; a body has num_layers * 2 * num_tokens *
    num_heads rows of the wire dtype.
    """

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""

    def mark(self) -> object:
        """Return a mark of what has been computed so far, for `gather`; on the thread that computes."""

    def gather(
        self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype, after: object = None
    ) -> int:
        """Copy the chunk's KV into `body`, behind a mark; return its checksum."""

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """Copy `body` into the chunk's blocks; return its checksum."""

    def warm_up(self) -> None:
        """Compile what would be compiled when it is first needed."""


class BlockCopier:
    """Gathers from, and scatters into, the blocks of one rank's KV store on CPU. See Copier."""

    def __init__(self, store: KVStore) -> None:
        """Raises ConfigError for a KV that it cannot move."""
        self._layout: KVLayout = store.layout
        if store.layout.row_bytes % 8:
            raise ConfigError(f"KV cannot be moved: {store.layout.row_bytes} bytes per head are no multiple of 8")
        self._store = store
        self._kv_dtype = KVDtype(store.layout.kv_dtype)
        self._first_head, _ = store.layout.heads_of(store.rank)
        self._keys_of = {kind: _draw_keys(kind.row_bytes(store.layout.head_dim) // 8) for kind in CONVERTED}
        self._keys = self._keys_of[self._kv_dtype]
        self._layers = [_words(store.layer(index)) for index in range(store.layout.num_layers)]

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""
        return self._layout

    def mark(self) -> object:
        """See Copier: a layer is announced when it has been written."""
        return None

    def gather(
        self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype, after: object = None
    ) -> int:
        """See Copier."""
        return self._move(_gather, _gather_converted, chunk, blocks, body, wire_dtype)

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """See Copier."""
        return self._move(_scatter, _scatter_converted, chunk, blocks, body, wire_dtype)

    def _move(
        self, copy: _Kernel, convert: _Kernel, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype
    ) -> int:
        words = np.frombuffer(body, np.uint64)
        parts = words.reshape(chunk.num_layers, -1)
        first_head, end_head = chunk.first_head - self._first_head, chunk.end_head - self._first_head
        ends = chunk.first_token, chunk.end_token, first_head, end_head
        numbers = self._layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]
        if wire_dtype != self._kv_dtype:
            size = self._layout.head_dim
            rows = (2, chunk.num_tokens, chunk.num_heads, wire_dtype.row_bytes(size))
            kinds = _KINDS[self._kv_dtype], _KINDS[wire_dtype]
            for number, part in zip(numbers, parts, strict=True):
                views = *_views(self._layers[number]), *_views(part.view(np.int8).reshape(rows))
                convert(*views, blocks, *ends, *kinds, size)
            return int(_checksum(words, self._keys_of[wire_dtype]))
        total = 0
        for place, number in enumerate(numbers):
            total += int(copy(self._layers[number], blocks, *ends, words, place * parts.shape[1], self._keys))
        return total % 2**64

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


def make_copier(store: KVStore) -> Copier:
    """Return the copier of a store on its device. Raises ConfigError for a KV that cannot be moved."""
    device = store.layer(0).device
    if device.type == "cpu":
        return BlockCopier(store)
    # Where there is no GPU, nothing of this is loaded.
    from pdserve.workers.kv.device_copy import CudaStreams, DeviceCopier

    return DeviceCopier(store, CudaStreams(device))
