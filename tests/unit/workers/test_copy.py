"""Gather and scatter: the right bytes, and a checksum that sees every change."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import CONVERTED, ChunkRange, GroupLayout, KVDtype, KVLayout
from pdserve.kvtransfer.layout import chunk_bytes
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.rows import TORCH_DTYPES, decode_rows, encode_rows
from pdserve.workers.kv.store import KVStore
from support.chunks import whole_stream


def make_layout(head_dim: int = 6, num_kv_heads: int = 3) -> KVLayout:
    return KVLayout(
        model_digest="m",
        kv_dtype=KVDtype.FLOAT32,
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        groups=(GroupLayout(window=0, layers=(1, 3)), GroupLayout(window=8, layers=(0, 2))),
    )


def make_store(layout: KVLayout, seed: int | None) -> KVStore:
    store = KVStore(layout, num_blocks=(8,) * len(layout.groups), device=torch.device("cpu"))
    for layer in range(layout.num_layers):
        values = store.layer(layer)
        if seed is None:
            values.fill_(float("nan"))
        else:
            values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(seed + layer)))
    return store


LAYOUT = make_layout()
WIRE = KVDtype.FLOAT32
CHUNK = ChunkRange(group=0, first_layer=0, end_layer=2, first_head=0, end_head=3, first_token=13, end_token=50)
SOURCE_BLOCKS = np.array([5, 0, 7, 2], np.int32)
SINK_BLOCKS = np.array([1, 6, 3, 4], np.int32)


def gathered(chunk: ChunkRange = CHUNK) -> tuple[bytearray, int]:
    body = bytearray(chunk_bytes(whole_stream(LAYOUT), chunk))
    checksum = BlockCopier(make_store(LAYOUT, 7)).gather(chunk, SOURCE_BLOCKS, memoryview(body), WIRE)
    return body, checksum


def test_a_body_is_layer_side_token_head_dimension() -> None:
    body, _ = gathered()
    found = torch.frombuffer(body, dtype=torch.float32).view(2, 2, 37, 3, 6)
    store = make_store(LAYOUT, 7)
    for place, layer in enumerate(LAYOUT.groups[0].layers):
        for index, token in enumerate(range(13, 50)):
            expected = store.layer(layer)[SOURCE_BLOCKS[token // 16], :, :, token % 16]
            assert torch.equal(found[place, :, index], expected)


def test_scattering_writes_the_chunk_and_nothing_else() -> None:
    # I1
    body, checksum = gathered()
    sink = make_store(LAYOUT, None)
    copier = BlockCopier(sink)
    assert copier.scatter(CHUNK, SINK_BLOCKS, memoryview(bytes(body)), WIRE) == checksum
    again = bytearray(len(body))
    assert copier.gather(CHUNK, SINK_BLOCKS, memoryview(again), WIRE) == checksum
    assert again == body
    written = sum(int((~torch.isnan(sink.layer(layer))).sum()) for layer in range(4))
    assert written == len(body) // 4
    assert torch.isnan(sink.layer(0)).all()


def test_the_checksum_sees_every_flipped_bit_and_every_swap() -> None:
    # I12
    body, checksum = gathered()
    copier = BlockCopier(make_store(LAYOUT, None))
    rng = np.random.default_rng(3)
    for _ in range(300):
        damaged = bytearray(body)
        damaged[rng.integers(len(body))] ^= 1 << int(rng.integers(8))
        assert copier.scatter(CHUNK, SINK_BLOCKS, memoryview(damaged), WIRE) != checksum
    row, layer_bytes = 6 * 4, len(body) // 2
    for first, second, size in ((0, row, row), (0, 8, 8), (0, 4, 4), (0, layer_bytes, layer_bytes), (24, 480, 240)):
        swapped = bytearray(body)
        swapped[first : first + size], swapped[second : second + size] = (
            body[second : second + size],
            body[first : first + size],
        )
        assert copier.scatter(CHUNK, SINK_BLOCKS, memoryview(swapped), WIRE) != checksum
    assert copier.scatter(CHUNK, SINK_BLOCKS, memoryview(bytes(len(body))), WIRE) != checksum


def test_equal_bytes_have_equal_checksums_in_every_process_and_version() -> None:
    # The value is part of the protocol: a change of the function must change the protocol version.
    layout = make_layout(head_dim=2, num_kv_heads=1)
    store = make_store(layout, None)
    store.layer(1).copy_(torch.arange(store.layer(1).numel(), dtype=torch.float32).view(store.layer(1).shape))
    body = bytearray(2 * 3 * 8)
    chunk = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=1, end_token=4)
    checksum = BlockCopier(store).gather(chunk, np.array([2], np.int32), memoryview(body), WIRE)
    assert np.frombuffer(body, np.float32)[:4].tolist() == [130.0, 131.0, 132.0, 133.0]
    words = np.frombuffer(body, np.uint64)
    keys = [(0xD1B54A32D192ED03 * 1) % 2**64]
    keys = [((key ^ (key >> 29)) * 0xBF58476D1CE4E5B9) % 2**64 for key in keys]
    keys = [key ^ (key >> 32) for key in keys]
    expected = 0
    for place, word in enumerate(words.tolist()):
        mixed = (word + keys[0] + place * 0x9E3779B97F4A7C15) % 2**64
        expected += (mixed & 0xFFFFFFFF) * (mixed >> 32)
    assert checksum == expected % 2**64


def test_a_layout_that_cannot_be_moved_is_refused() -> None:
    with pytest.raises(ConfigError, match="no multiple of 8"):
        BlockCopier(make_store(make_layout(head_dim=3), 0))


@pytest.mark.parametrize("held", sorted(CONVERTED))
@pytest.mark.parametrize("wire", sorted(CONVERTED))
@pytest.mark.parametrize("heads", [(0, 4), (1, 3), (3, 4)])
def test_a_body_of_another_dtype_holds_the_rows_that_torch_makes(
    held: KVDtype, wire: KVDtype, heads: tuple[int, int]
) -> None:
    layout = replace(make_layout(head_dim=8, num_kv_heads=4), kv_dtype=held)
    store = KVStore(layout, num_blocks=(8, 8), device=torch.device("cpu"))
    for layer in range(layout.num_layers):
        values = torch.randn(8, 2, 4, 16, 8, generator=torch.Generator().manual_seed(layer))
        values[0] = 0.0
        store.layer(layer).copy_(encode_rows(values, held))
    chunk = replace(CHUNK, first_head=heads[0], end_head=heads[1])
    row = wire.row_bytes(8)
    body = bytearray(2 * 2 * 37 * (heads[1] - heads[0]) * row)
    copier = BlockCopier(store)
    checksum = copier.gather(chunk, SOURCE_BLOCKS, memoryview(body), wire)
    found = torch.frombuffer(bytearray(body), dtype=TORCH_DTYPES[wire]).view(2, 2, 37, heads[1] - heads[0], -1)
    for place, layer in enumerate(layout.groups[0].layers):
        for index, token in enumerate(range(13, 50)):
            rows = store.layer(layer)[SOURCE_BLOCKS[token // 16], :, heads[0] : heads[1], token % 16].contiguous()
            expected = rows if held is wire else encode_rows(decode_rows(rows, 8), wire)
            torch.testing.assert_close(found[place, :, index], expected, rtol=0, atol=0)
    # Back into other blocks of another store; the checksum is of the body, whatever is done with it.
    other = KVStore(layout, num_blocks=(8, 8), device=torch.device("cpu"))
    assert BlockCopier(other).scatter(chunk, SINK_BLOCKS, memoryview(bytes(body)), wire) == checksum
    for place, layer in enumerate(layout.groups[0].layers):
        rows = torch.stack(
            [other.layer(layer)[SINK_BLOCKS[t // 16], :, heads[0] : heads[1], t % 16] for t in range(13, 50)], dim=1
        )
        came = found[place]
        expected = came if held is wire else encode_rows(decode_rows(came.contiguous(), 8), held)
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)
        untouched = other.layer(layer)[:, :, [head for head in range(4) if not heads[0] <= head < heads[1]]]
        assert not untouched.view(torch.int8).any()


def test_a_row_that_is_not_finite_stays_so_in_every_dtype() -> None:
    layout = make_layout(head_dim=8, num_kv_heads=1)
    store = make_store(layout, 1)
    store.layer(1)[5, 0, 0, 13, 3] = float("nan")
    chunk = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=13, end_token=14)
    for wire in sorted(CONVERTED):
        body = bytearray(2 * wire.row_bytes(8))
        BlockCopier(store).gather(chunk, SOURCE_BLOCKS, memoryview(body), wire)
        rows = torch.frombuffer(bytearray(body), dtype=TORCH_DTYPES[wire]).view(2, -1)
        assert decode_rows(rows, 8)[0].isnan().any()
        assert decode_rows(rows, 8)[1].isfinite().all()
