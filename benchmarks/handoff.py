"""Speed of the KV hand-off: bytes per second and added latency, by transport and chunk size.

    python -m pdserve.benchmarks.handoff [--transports shm tcp] [--slot-mib 1 4 16] [--repeats 3]

A prefill and a decode worker in processes of their own, one core each, with the KV layout of Gemma-3-270M without
windows (36 KiB a token). Their engines compute nothing, so the transfer is all there is. In the same run, on the same
cores, two yardsticks: the *two-copy limit* (plain copies of 3 MiB from one process's memory into shared slots, and on
into the other's), and a *raw socket* (the same bytes over loopback). Rounds take turns (yardsticks, shm, tcp, …).

Rate: twelve prompts of 4096 tokens in steps of 2048, four at a time, bytes over the time from the first request to the
last COMMIT. Added latency: one prompt of one block, from the last layer's KV at the source to the first decode step at
the sink. With --model, a real model prefills prompts of 2048 tokens in chunks of 512, and the share of bytes that the
sink had credited before prefill ended is shown.
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.local_cluster import LocalCluster, WorkerPlan, running_cluster
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import EngineConfig, TransferConfig, TransportKind
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import StepOutput, StepPlan
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.source import prepare_model

LAYOUT = KVLayout(
    model_digest="null",
    kv_dtype=KVDtype.FLOAT32,
    block_size=16,
    num_kv_heads=1,
    head_dim=256,
    groups=(GroupLayout(window=0, layers=tuple(range(18))),),
)
NUM_BLOCKS = 1300
PROMPT = 4096
NUM_PROMPTS, NUM_CLIENTS = 12, 4
YARDSTICK_BYTES = 64 << 20
PIECE_BYTES = 3 << 20
STORE_BYTES = 512 << 20
RING_SLOTS = 8
YARDSTICK_PIECES = 1000
YARDSTICK_S = 1.5
GIB = 1 << 30

Ring = ctypes.Array[ctypes.c_byte]


class NullRunner:
    """Announces layers and samples token 7; computes nothing. Notes when it did, in its process's environment."""

    def __init__(self, times: "Queue[tuple[str, float]] | None" = None) -> None:
        self._times = times

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Nobody forks here."""

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """See ModelRunner."""
        if on_layer is None and self._times is not None:
            self._times.put(("decode", time.monotonic()))
        if on_layer is not None:
            for layer in range(LAYOUT.num_layers):
                on_layer(layer)
            if self._times is not None:
                self._times.put(("last layer", time.monotonic()))
        return StepOutput(token_ids=np.full(len(plan.sample_rows), 7, np.int32))


def make_null_engine(times: "Queue[tuple[str, float]]") -> tuple[Engine, KVStore]:
    """Return an engine that computes nothing, over a store whose memory is all touched."""
    store = KVStore(LAYOUT, num_blocks=(NUM_BLOCKS,), device=torch.device("cpu"))
    for layer in range(LAYOUT.num_layers):
        store.layer(layer).normal_()
    settings = SchedulerSettings(
        block_size=16,
        max_running=64,
        max_batch_tokens=2048,
        max_waiting=64,
        max_model_len=NUM_BLOCKS * 16,
        has_prefix_cache=False,
    )
    engine = Engine(
        settings, NullRunner(times), layout=LAYOUT, num_blocks=(NUM_BLOCKS,), clock=SystemClock(), promised_share=1.0
    )
    return engine, store


def make_model_engine(folder: Path) -> tuple[Engine, KVStore]:
    """Return an engine on a real model."""
    assembled = assemble_engine(
        folder,
        EngineConfig(kv_memory_gib=0.7, prefix_cache=False),
        max_model_len=None,
        num_threads=1,
        clock=SystemClock(),
        promised_share=1.0,
    )
    return assembled.engine, assembled.store


def make_request(name: str, num_prompt: int, num_new: int) -> Request:
    """Return a greedy request."""
    rng = np.random.default_rng(abs(hash(name)) % 2**32)
    return Request(
        request_id=RequestId(name),
        attempt=0,
        prompt_token_ids=tuple(rng.integers(1000, 20000, num_prompt).tolist()),
        sampling=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
    )


# Yardsticks.


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


def raw_socket() -> float:
    """Return GiB/s of a loopback connection between two processes, received into pieces of a large buffer."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {1})
    target = memoryview(bytearray(8 * PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_send_process, args=(0, server.getsockname()[1]), daemon=True)
        process.start()
        connection, _ = server.accept()
        with connection:
            done, start = 0, 0.0
            while not start or time.perf_counter() - start < YARDSTICK_S:
                into = done // PIECE_BYTES % 8 * PIECE_BYTES
                view = target[into : into + PIECE_BYTES]
                while view:
                    count = connection.recv_into(view)
                    view = view[count:]
                done += PIECE_BYTES
                if not start and done >= YARDSTICK_BYTES:
                    done, start = 0, time.perf_counter()
            rate = done / (time.perf_counter() - start)
    process.join()
    os.sched_setaffinity(0, before)
    return rate / GIB


# Ours.


async def _first_token(cluster: LocalCluster, request: Request) -> None:
    async with cluster.replayer.open(request) as run:
        async for _ in run:
            pass


async def measure_transfer(
    transport: TransportKind, slot_bytes: int, *, num_latencies: int = 30
) -> tuple[float, list[float]]:
    """Return GiB/s, and seconds from the last layer to the first decode step of small prompts."""
    context = multiprocessing.get_context("spawn")
    times: Queue[tuple[str, float]] = context.Queue()
    plans = [
        WorkerPlan(role=role, make_engine=partial(make_null_engine, times), core=core)
        for core, role in enumerate((Role.PREFILL, Role.DECODE))
    ]
    transfer = TransferConfig(transports=(transport,), slot_bytes=slot_bytes, promised_share=1.0)
    async with running_cluster(plans, transfer) as cluster:
        await _first_token(cluster, make_request("warm", PROMPT, 2))
        requests = iter([make_request(f"r{number}", PROMPT, 2) for number in range(NUM_PROMPTS)])

        async def client() -> None:
            for request in requests:
                await _first_token(cluster, request)

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        rate = NUM_PROMPTS * PROMPT * LAYOUT.num_layers * LAYOUT.token_bytes / (time.perf_counter() - start) / GIB
        await asyncio.sleep(0.1)
        while not times.empty():
            times.get()
        latencies = []
        for number in range(num_latencies):
            await _first_token(cluster, make_request(f"small{number}", 16, 2))
            events: dict[str, float] = {}
            for _ in range(2):
                name, moment = await asyncio.to_thread(times.get, True, 5.0)
                events[name] = moment
            latencies.append(events["decode"] - events["last layer"])
    return rate, latencies


async def measure_overlap(folder: Path, transport: TransportKind) -> tuple[float, int]:
    """Return the mean share of bytes credited before prefill ended, over prompts of four chunks, and how many."""
    plans = [
        WorkerPlan(role=role, make_engine=partial(make_model_engine, folder), core=core)
        for core, role in enumerate((Role.PREFILL, Role.DECODE))
    ]
    async with running_cluster(plans, TransferConfig(transports=(transport,), promised_share=1.0)) as cluster:
        for number in range(3):
            await _first_token(cluster, make_request(f"long{number}", 2048, 2))
        texts = await cluster.controller.metrics()
    num_prompts = int(_sum_of("pdserve_kv_early_share_count", texts))
    return _sum_of("pdserve_kv_early_share_sum", texts) / num_prompts, num_prompts


def _sum_of(name: str, texts: list[str]) -> float:
    lines = [line for text in texts for line in text.splitlines()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=[kind.value for kind in TransportKind])
    parser.add_argument("--slot-mib", type=float, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="measure the overlap with this model too, for example `demo`")
    options = parser.parse_args(arguments)
    limits: dict[str, list[float]] = {"shm": [], "tcp": []}
    rates: dict[tuple[str, float], list[float]] = {}
    latencies: dict[tuple[str, float], list[float]] = {}
    for _ in range(options.repeats):
        limits["shm"].append(two_copy_limit())
        limits["tcp"].append(raw_socket())
        for name in options.transports:
            for size in options.slot_mib:
                rate, found = asyncio.run(measure_transfer(TransportKind(name), int(size * (1 << 20))))
                rates.setdefault((name, size), []).append(rate)
                latencies.setdefault((name, size), []).extend(found)
    rows = []
    for name, label in (("shm", "two-copy limit"), ("tcp", "raw loopback socket")):
        found = limits[name]
        print(f"{label:<22}{statistics.median(found):6.2f} GiB/s  ({min(found):.2f}-{max(found):.2f})")
    print(f"{'transport':<10}{'slot MiB':>9}{'GiB/s':>8}{'spread':>14}{'of limit':>10}{'added ms p50':>14}{'p95':>7}")
    for (name, size), found in rates.items():
        share = statistics.median(found) / statistics.median(limits[name])
        added = 1000 * np.percentile(latencies[name, size], [50, 95])
        rows.append(
            {
                "transport": name,
                "slot_mib": size,
                "gib_per_s": round(statistics.median(found), 3),
                "spread": [round(min(found), 3), round(max(found), 3)],
                "share_of_limit": round(share, 3),
                "added_ms_p50": round(float(added[0]), 2),
                "added_ms_p95": round(float(added[1]), 2),
            }
        )
        print(
            f"{name:<10}{size:>9g}{statistics.median(found):>8.2f}{f'{min(found):.2f}-{max(found):.2f}':>14}"
            f"{share:>10.0%}{added[0]:>14.2f}{added[1]:>7.2f}"
        )
    overlap = {}
    if options.model:
        folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
        for name in options.transports:
            share, num_prompts = asyncio.run(measure_overlap(folder, TransportKind(name)))
            overlap[name] = round(share, 4)
            print(
                f"{name}: {share:.1%} of the bytes of {num_prompts} prompts of 2048 tokens credited "
                "before prefill ended"
            )
    result = {"benchmark": "handoff", "limits_gib_per_s": limits, "rows": rows, "overlap": overlap}
    print(json.dumps({**result, **describe_environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
