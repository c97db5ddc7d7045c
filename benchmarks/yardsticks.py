"""Yardsticks of the hand-off: what the machine gives to two processes, one core each, that only move bytes.

Rates are GiB/s, from core 0 to core 1.
"""

import ctypes
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.benchmarks.handoff_workers import GIB, LAYOUT
from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.store import KVStore

YARDSTICK_BYTES = 64 << 20
PIECE_BYTES = 3 << 20
STORE_BYTES = 512 << 20
RING_SLOTS = 8
YARDSTICK_PIECES = 1000
YARDSTICK_S = 1.5
LIBRARY_PIECE_BYTES = 4 << 20
LIBRARY_SLOTS = 4
LIBRARY_PIECES = 400

Ring = ctypes.Array[ctypes.c_byte]


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _copy_out(ring: "Ring", free: Semaphore, full: Semaphore) -> None:
    os.sched_setaffinity(0, {0})
    store, slots = _touched(STORE_BYTES), np.frombuffer(memoryview(ring), np.uint8)
    for number in count():
        free.acquire()
        slot, place = number % RING_SLOTS * PIECE_BYTES, number * PIECE_BYTES % (STORE_BYTES - PIECE_BYTES)
        slots[slot : slot + PIECE_BYTES] = store[place : place + PIECE_BYTES]
        full.release()


def _copy_in(ring: "Ring", free: Semaphore, full: Semaphore, result: Connection) -> None:
    os.sched_setaffinity(0, {1})
    store, slots = _touched(STORE_BYTES), np.frombuffer(memoryview(ring), np.uint8)
    start = 0.0
    for number in range(2 * YARDSTICK_PIECES):
        full.acquire()
        if number == YARDSTICK_PIECES:
            start = time.perf_counter()
        slot, place = number % RING_SLOTS * PIECE_BYTES, number * PIECE_BYTES % (STORE_BYTES - PIECE_BYTES)
        store[place : place + PIECE_BYTES] = slots[slot : slot + PIECE_BYTES]
        free.release()
    result.send(YARDSTICK_PIECES * PIECE_BYTES / (time.perf_counter() - start))


def _touched(size: int) -> NDArray[np.uint8]:
    return np.full(size, 1, np.uint8)


def two_copy_limit() -> float:
    """Return GiB/s of two processes: one copies from its memory into shared slots, the other on into its own."""
    context = multiprocessing.get_context("spawn")
    ring = context.RawArray(ctypes.c_byte, RING_SLOTS * PIECE_BYTES)
    free, full = context.Semaphore(RING_SLOTS), context.Semaphore(0)
    ours, theirs = context.Pipe()
    sender = context.Process(target=_copy_out, args=(ring, free, full), daemon=True)
    receiver = context.Process(target=_copy_in, args=(ring, free, full, theirs), daemon=True)
    for process in (sender, receiver):
        process.start()
    rate = float(ours.recv())
    sender.kill()
    for process in (sender, receiver):
        process.join()
    return rate / GIB


def _send_process(core: int, port: int) -> None:
    os.sched_setaffinity(0, {core})
    source = memoryview(bytes(YARDSTICK_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                for first in range(0, YARDSTICK_BYTES, PIECE_BYTES):
                    connection.sendall(source[first : first + PIECE_BYTES])
        except OSError:
            return


@pinned(1)
def raw_socket() -> float:
    """Return GiB/s of a loopback connection between two processes, received into pieces of a large buffer."""
    target = memoryview(bytearray(RING_SLOTS * PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_send_process, args=(0, server.getsockname()[1]), daemon=True)
        process.start()
        connection, _ = server.accept()
        with connection:
            done, start = 0, 0.0
            while not start or time.perf_counter() - start < YARDSTICK_S:
                into = done // PIECE_BYTES % RING_SLOTS * PIECE_BYTES
                view = target[into : into + PIECE_BYTES]
                while view:
                    count = connection.recv_into(view)
                    view = view[count:]
                done += PIECE_BYTES
                if not start and done >= YARDSTICK_BYTES:
                    done, start = 0, time.perf_counter()
            rate = done / (time.perf_counter() - start)
    process.join()
    return rate / GIB


def _nixl_agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    # Without its progress thread: with one core a side that would take from the writes.
    return nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))


def _nixl_target(connection: Connection) -> None:
    os.sched_setaffinity(0, {1})
    agent = _nixl_agent("target")
    region = torch.zeros(LIBRARY_SLOTS, LIBRARY_PIECE_BYTES, dtype=torch.uint8)
    agent.register_memory(region)
    places = agent.get_serialized_descs(agent.get_xfer_descs([region[slot] for slot in range(LIBRARY_SLOTS)]))
    connection.send((agent.get_agent_metadata(), places))
    arrived = 0
    while arrived < LIBRARY_PIECES:
        arrived += sum(len(messages) for messages in agent.get_new_notifs().values())
    connection.send(time.perf_counter())
    connection.recv()


@pinned(0)
def raw_nixl() -> float:
    """Return GiB/s of NIXL writes of 4 MiB with notifications, one after the other, from four slots into four."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_nixl_target, args=(theirs,), daemon=True)
    process.start()
    agent = _nixl_agent("source")
    slots = torch.ones(LIBRARY_SLOTS, LIBRARY_PIECE_BYTES, dtype=torch.uint8)
    agent.register_memory(slots)
    metadata, places = ours.recv()
    peer = agent.add_remote_agent(metadata)
    own = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [slots[slot] for slot in range(LIBRARY_SLOTS)])
    remote = agent.prep_xfer_dlist(peer, agent.deserialize_descs(places))
    start = time.perf_counter()
    for number in range(LIBRARY_PIECES):
        slot = number % LIBRARY_SLOTS
        handle = agent.make_prepped_xfer("WRITE", own, [slot], remote, [slot], b"%d" % number)
        agent.transfer(handle)
        while agent.check_xfer_state(handle) == "PROC":
            pass
        agent.release_xfer_handle(handle)
    # perf_counter is one clock for all processes.
    end = float(ours.recv())
    ours.send("done")
    process.join()
    return LIBRARY_PIECES * LIBRARY_PIECE_BYTES / (end - start) / GIB


def _gloo_pair(rank: int, port: int) -> Any:
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))


def _gloo_target(port: int) -> None:
    os.sched_setaffinity(0, {1})
    pair = _gloo_pair(1, port)
    slots = torch.zeros(LIBRARY_SLOTS, LIBRARY_PIECE_BYTES, dtype=torch.uint8)
    for number in range(LIBRARY_PIECES + 1):
        pair.recv([slots[number % LIBRARY_SLOTS]], 0, 1).wait()


@pinned(0)
def raw_gloo() -> float:
    """Return GiB/s of Gloo sends of 4 MiB, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_gloo_target, args=(port,), daemon=True)
    process.start()
    pair = _gloo_pair(0, port)
    slots = torch.ones(LIBRARY_SLOTS, LIBRARY_PIECE_BYTES, dtype=torch.uint8)
    pair.send([slots[0]], 1, 1).wait()
    start = time.perf_counter()
    for number in range(LIBRARY_PIECES):
        pair.send([slots[number % LIBRARY_SLOTS]], 1, 1).wait()
    rate = LIBRARY_PIECES * LIBRARY_PIECE_BYTES / (time.perf_counter() - start) / GIB
    process.join()
    return rate


@numba.njit(nogil=True)
def _copy_only(kv, blocks, first, end, body):  # type: ignore[no-untyped-def]  # numba infers the types
    block_size, size = kv.shape[3], kv.shape[4]
    at = 0
    for side in range(2):
        for token in range(first, end):
            row = kv[blocks[token // block_size], side, 0, token % block_size]
            body[at : at + size] = row
            at += size


CPU_KINDS = (KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.INT8)


@pinned(0)
def checksum_cost(num_tokens: int = 2048, repeats: int = 60) -> dict[str, float]:
    """Return GiB/s of core 0, by operation and wire dtype: gathering without and with the checksum, and scattering."""
    layout = LAYOUT
    num_blocks = num_tokens // layout.block_size
    store = KVStore(layout, num_blocks=(num_blocks,), device=torch.device("cpu"))
    for layer in range(layout.num_layers):
        store.layer(layer).normal_()
    copier = BlockCopier(store)
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    whole = num_tokens * layout.token_bytes
    bodies = {kind: memoryview(bytearray(num_tokens * 2 * kind.row_bytes(layout.head_dim))) for kind in CPU_KINDS}
    words = np.frombuffer(bodies[KVDtype.FLOAT32], np.uint64)

    def chunk_of(layer: int) -> ChunkRange:
        return ChunkRange(
            group=0,
            first_layer=layer,
            end_layer=layer + 1,
            first_head=0,
            end_head=1,
            first_token=0,
            end_token=num_tokens,
        )

    def rate(act: Any) -> float:
        act(0)
        start = time.perf_counter()
        for number in range(repeats):
            act(number % layout.num_layers)
        return repeats * whole / (time.perf_counter() - start) / GIB

    layers = [store.layer(layer).numpy().view(np.uint64) for layer in range(layout.num_layers)]
    found = {"gather, no checksum": rate(lambda layer: _copy_only(layers[layer], blocks, 0, num_tokens, words))}
    for name, copy in (("gather to", copier.gather), ("scatter from", copier.scatter)):
        for kind in CPU_KINDS:

            def act(layer: int, copy: Any = copy, kind: KVDtype = kind) -> None:
                copy(chunk_of(layer), blocks, bodies[kind], kind)

            found[f"{name} {kind}"] = rate(act)
    return found
