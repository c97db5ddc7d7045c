"""Copies between KV blocks on a GPU and chunk bodies in host memory, through pinned staging, on streams of their own.

The same bodies and checksums as kv/copy: one rank may be on a CPU and its peer on a GPU. What makes it right is the
order of streams:

    gather    the copying stream waits for the event that the computing stream recorded when the layer was written
              (`mark`), copies rows to staging, and the thread waits for the copying stream before it reads them
    scatter   the thread computes the checksum while it stages the body, copies, and waits for the copying stream before
              it reports; so the step that reads the blocks is launched after they were written. A wrong body, which its
              caller refuses, is in blocks that nobody reads

Each thread that copies has a stream and staging of its own.
Nothing here waits for the computing stream: a step is over on it before its blocks are given to anybody else
(ModelRunner.execute).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype, KVLayout
from pdserve.workers.engine.plan import Int32
from pdserve.workers.kv.copy import BodyChecksum
from pdserve.workers.kv.store import KVStore


class Mark(Protocol):
    """A point in what the computing stream has been given."""


class Streams(Protocol):
    """The streams of one device, seen from any thread."""

    def mark(self) -> Mark:
        """Return the present point of the calling thread's stream: the computing one."""

    @contextmanager
    def copying(self, after: Mark | None) -> Iterator[None]:
        """Run on the calling thread's copying stream, behind `after`; when it ends, what was asked for is done."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Return host memory of this thread that the device copies to and from, uint8 [at least num_bytes]."""


class CudaStreams:
    """See Streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()

    def mark(self) -> torch.cuda.Event:
        """See Streams."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def copying(self, after: Mark | None) -> Iterator[None]:
        """See Streams."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # nor here
            self._local.stream = stream
        with torch.cuda.stream(stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event), "a mark of these streams"
                stream.wait_event(after)
            try:
                yield
            finally:
                stream.synchronize()

    def staging(self, num_bytes: int) -> torch.Tensor:
        """See Streams."""
        held: torch.Tensor | None = getattr(self._local, "staging", None)
        if held is None or len(held) < num_bytes:
            held = self._local.staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return held


class DeviceCopier:
    """Gathers from, and scatters into, the blocks of a KV store on a device. See kv.copy.Copier."""

    def __init__(self, store: KVStore, streams: Streams) -> None:
        """Raises ConfigError for a KV that it cannot move."""
        if store.layout.row_bytes % 8:
            raise ConfigError(f"KV cannot be moved: {store.layout.row_bytes} bytes per head are no multiple of 8")
        self._store = store
        self._streams = streams
        self._kv_dtype = KVDtype(store.layout.kv_dtype)
        self._first_head, _ = store.layout.heads_of(store.rank)
        self._checksum = BodyChecksum(store.layout.row_bytes)

    @property
    def layout(self) -> KVLayout:
        """The layout of the store."""
        return self._store.layout

    def mark(self) -> Mark:
        """See Copier: on the thread that computes."""
        return self._streams.mark()

    def gather(
        self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype, after: object = None
    ) -> int:
        """See Copier."""
        self._check(wire_dtype)
        staging = self._streams.staging(len(body))[: len(body)]
        with self._streams.copying(after):
            self._rows_of(staging, chunk).copy_(self._gathered(chunk, blocks), non_blocking=True)
        return self._checksum.copy(staging.numpy(), np.frombuffer(body, np.uint8))

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """See Copier: a body whose checksum does not hold is written too, as on a CPU; its caller refuses it."""
        self._check(wire_dtype)
        staging = self._streams.staging(len(body))[: len(body)]
        checksum = self._checksum.copy(np.frombuffer(body, np.uint8), staging.numpy())
        with self._streams.copying(None):
            rows = self._rows_of(staging, chunk).to(self._store.layer(0).device, non_blocking=True)
            places = self._places(chunk, blocks)
            for number, part in zip(self._layer_numbers(chunk), rows, strict=True):
                self._store.layer(number).view(torch.uint8).index_put_(places, part)
        return checksum

    def warm_up(self) -> None:
        """Compile the host's kernels."""
        empty = np.zeros(0, np.uint8)
        self._checksum.copy(empty, empty.copy())

    def _check(self, wire_dtype: KVDtype) -> None:
        if wire_dtype is not self._kv_dtype:
            raise ConfigError(f"KV of {self._kv_dtype} on a GPU is not converted to {wire_dtype}")

    def _layer_numbers(self, chunk: ChunkRange) -> tuple[int, ...]:
        return self._store.layout.groups[chunk.group].layers[chunk.first_layer : chunk.end_layer]

    def _rows_of(self, staging: torch.Tensor, chunk: ChunkRange) -> torch.Tensor:
        """View a body as [layers, 2, tokens, heads, row bytes]."""
        shape = (chunk.num_layers, 2, chunk.num_tokens, chunk.num_heads, self._store.layout.row_bytes)
        return staging.view(shape)

    def _places(self, chunk: ChunkRange, blocks: Int32) -> tuple[torch.Tensor, ...]:
        """Return indexes into a layer [N, 2, H, B, row bytes] that give [2, tokens, heads, row bytes]."""
        device = self._store.layer(0).device
        tokens = torch.arange(chunk.first_token, chunk.end_token)
        block_size = self._store.block_size
        block = torch.from_numpy(blocks).long()[tokens // block_size].to(device)
        offset = (tokens % block_size).to(device)
        heads = torch.arange(chunk.first_head, chunk.end_head, device=device) - self._first_head
        sides = torch.arange(2, device=device)
        return block[None, :, None], sides[:, None, None], heads[None, None, :], offset[None, :, None]

    def _gathered(self, chunk: ChunkRange, blocks: Int32) -> torch.Tensor:
        places = self._places(chunk, blocks)
        layers = [self._store.layer(number).view(torch.uint8)[places] for number in self._layer_numbers(chunk)]
        return torch.stack(layers)
