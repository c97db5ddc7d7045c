"""KV on a device: the bodies and checksums of a CPU's copier, and the order in which streams are asked for things."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import ChunkRange, GroupLayout, KVDtype, KVLayout
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.device_copy import DeviceCopier
from pdserve.workers.kv.store import KVStore

CHUNK = ChunkRange(group=0, first_layer=0, end_layer=2, first_head=2, end_head=4, first_token=5, end_token=41)
SOURCE_BLOCKS: Int32 = np.array([6, 1, 3], np.int32)
SINK_BLOCKS: Int32 = np.array([0, 5, 2], np.int32)


class LoggedStreams:
    """Streams of a device that does everything at once; notes what was asked. See Streams."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._num_marks = 0

    def mark(self) -> str:
        self._num_marks += 1
        self.log.append(f"mark {self._num_marks}")
        return f"mark {self._num_marks}"

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        self.log.append(f"copy after {after}")
        yield
        self.log.append("done")

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes + 64, dtype=torch.uint8)


def make_store(kv_dtype: KVDtype, seed: int | None, *, rank: int = 1, head_dim: int = 16) -> KVStore:
    layout = KVLayout(
        model_digest="m",
        kv_dtype=kv_dtype,
        block_size=16,
        num_kv_heads=4,
        head_dim=head_dim,
        groups=(GroupLayout(window=0, layers=(0, 2)), GroupLayout(window=32, layers=(1,))),
        tp_size=2,
    )
    store = KVStore(layout, num_blocks=(8, 8), device=torch.device("cpu"), rank=rank)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for layer in range(3):
            held = store.layer(layer).view(torch.uint8)
            held.copy_(torch.randint(0, 256, held.shape, dtype=torch.uint8, generator=generator))
    return store


def body_bytes(store: KVStore) -> int:
    return CHUNK.num_layers * 2 * CHUNK.num_tokens * CHUNK.num_heads * store.layout.row_bytes


def test_a_device_and_a_cpu_make_the_same_bodies() -> None:
    store = make_store(KVDtype.FLOAT16, seed=1)
    bodies = [bytearray(body_bytes(store)) for _ in range(2)]
    device = DeviceCopier(store, LoggedStreams())
    checksums = [
        copier.gather(CHUNK, SOURCE_BLOCKS, memoryview(body), KVDtype.FLOAT16)
        for copier, body in zip((BlockCopier(store), device), bodies, strict=True)
    ]
    assert bodies[0] == bodies[1]
    assert checksums[0] == checksums[1]
    sinks = [make_store(KVDtype.FLOAT16, seed=None) for _ in range(2)]
    found = [
        copier.scatter(CHUNK, SINK_BLOCKS, memoryview(bytes(bodies[0])), KVDtype.FLOAT16)
        for copier in (BlockCopier(sinks[0]), DeviceCopier(sinks[1], LoggedStreams()))
    ]
    assert found == checksums
    for layer in range(3):
        one, other = (sink.layer(layer).view(torch.uint8) for sink in sinks)
        assert torch.equal(one, other)


@pytest.mark.parametrize("kv_dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT8])
def test_dtypes_of_devices_come_through_as_they_are(kv_dtype: KVDtype) -> None:
    source, sink = make_store(kv_dtype, seed=2), make_store(kv_dtype, seed=None)
    body = bytearray(body_bytes(source))
    sent = DeviceCopier(source, LoggedStreams()).gather(CHUNK, SOURCE_BLOCKS, memoryview(body), kv_dtype)
    assert DeviceCopier(sink, LoggedStreams()).scatter(CHUNK, SINK_BLOCKS, memoryview(body), kv_dtype) == sent
    for token in range(CHUNK.first_token, CHUNK.end_token):
        block, offset = token // 16, token % 16
        for layer in (0, 2):
            there = source.layer(layer).view(torch.uint8)[SOURCE_BLOCKS[block], :, :, offset]
            assert torch.equal(sink.layer(layer).view(torch.uint8)[SINK_BLOCKS[block], :, :, offset], there)
    assert not sink.layer(1).view(torch.uint8).any(), "another group"


def test_a_gather_waits_for_the_layer_and_its_bytes_are_read_when_it_is_done() -> None:
    streams = LoggedStreams()
    copier = DeviceCopier(make_store(KVDtype.FLOAT16, seed=1), streams)
    mark = copier.mark()
    later = copier.mark()
    copier.gather(
        CHUNK, SOURCE_BLOCKS, memoryview(bytearray(body_bytes(make_store(KVDtype.FLOAT16, 1)))), KVDtype.FLOAT16, mark
    )
    assert later == "mark 2"
    assert streams.log == ["mark 1", "mark 2", "copy after mark 1", "done"]


def test_what_is_not_converted_is_refused() -> None:
    copier = DeviceCopier(make_store(KVDtype.BFLOAT16, seed=1), LoggedStreams())
    with pytest.raises(ConfigError, match="KV of bfloat16 on a GPU is not converted to float16"):
        copier.gather(CHUNK, SOURCE_BLOCKS, memoryview(bytearray(64)), KVDtype.FLOAT16)
    with pytest.raises(ConfigError, match="no multiple of 8"):
        DeviceCopier(make_store(KVDtype.FLOAT8, seed=1, head_dim=18), LoggedStreams())
