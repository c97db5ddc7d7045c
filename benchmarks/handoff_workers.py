"""Prefill and decode workers whose engines compute nothing, or a real model, and what is measured of their hand-off."""

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch

from pdserve.benchmarks.local_cluster import LocalCluster, WorkerPlan, running_cluster
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.request import FinishReason, Request, SamplingParams
from pdserve.cluster.base.worker_info import Role
from pdserve.kvtransfer import layout as transfer_layout
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.kv.store import KVStore

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
NUM_PROMPTS = 12
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of handing over."""

    transport: TransportKind
    slot_bytes: int = 4 << 20
    num_clients: int = 4
    """Prompts under way at a time."""
    layers_per_chunk: int = 3
    num_sources: int = 1


class NullRunner:
    """Announces layers and samples token 7; computes nothing. Notes when it did, in its process's environment."""

    def __init__(self, num_layers: int, times: "Queue[tuple[str, float]] | None" = None) -> None:
        self._num_layers = num_layers
        self._times = times

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Nobody forks here."""

    def settle(self, copies: Copies) -> None:
        """There is one rank."""

    def execute(
        self,
        plan: StepPlan,
        on_layer: Callable[[int], None] | None = None,
        exported: Exported = (),
        copies: Copies = (),
    ) -> StepOutput:
        """See ModelRunner."""
        if on_layer is None and self._times is not None:
            self._times.put(("decode", time.monotonic()))
        if on_layer is not None:
            for layer in range(self._num_layers):
                on_layer(layer)
            if self._times is not None:
                self._times.put(("last layer", time.monotonic()))
        return StepOutput(token_ids=np.full(len(plan.sample_rows), 7, np.int32))


def make_null_engine(times: "Queue[tuple[str, float]]", layers_per_chunk: int) -> tuple[Engine, KVStore]:
    """Return an engine that computes nothing, over a store whose memory is all touched."""
    # In this worker's process; the sink takes what comes.
    transfer_layout.LAYER_SHARE = LAYOUT.num_layers // layers_per_chunk
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
    runner = NullRunner(LAYOUT.num_layers, times)
    engine = Engine(settings, runner, layout=LAYOUT, num_blocks=(NUM_BLOCKS,), clock=SystemClock(), promised_share=1.0)
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


def make_request(name: str, num_prompt: int, num_new: int, vocab: range = range(1000, 20000)) -> Request:
    """Return a greedy request over a part of the vocabulary."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return Request(
        request_id=RequestId(name),
        attempt=0,
        prompt_token_ids=tuple(rng.integers(vocab.start, vocab.stop, num_prompt).tolist()),
        sampling=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
    )


async def run_to_end(cluster: LocalCluster, request: Request) -> list[int]:
    """Run a request to its end and return its tokens; raises RuntimeError if it fails."""
    tokens: list[int] = []
    async with cluster.replayer.open(request) as run:
        async for delta in run:
            tokens.extend(delta.token_ids)
            if delta.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"request {request.request_id}: {delta.error}")
    return tokens


async def measure_transfer(case: Case, *, num_latencies: int = 30) -> tuple[float, list[float]]:
    """Return GiB/s, and seconds from the last layer to the first decode step of small prompts."""
    times: Queue[tuple[str, float]] = get_context("spawn").Queue()
    make_engine = partial(make_null_engine, times, case.layers_per_chunk)
    plans = [WorkerPlan(role=Role.PREFILL, make_engine=make_engine, core=0) for _ in range(case.num_sources)]
    plans.append(WorkerPlan(role=Role.DECODE, make_engine=make_engine, core=1))
    transfer = TransferConfig(transports=(case.transport,), slot_bytes=case.slot_bytes, promised_share=1.0)
    async with running_cluster(plans, transfer) as cluster:
        await asyncio.gather(*(run_to_end(cluster, make_request(f"warm{n}", PROMPT, 2)) for n in range(2)))
        requests = iter([make_request(f"r{number}", PROMPT, 2) for number in range(NUM_PROMPTS)])

        async def client() -> None:
            for request in requests:
                await run_to_end(cluster, request)

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(case.num_clients)))
        rate = NUM_PROMPTS * PROMPT * LAYOUT.num_layers * LAYOUT.token_bytes / (time.perf_counter() - start) / GIB
        await asyncio.sleep(0.1)
        while not times.empty():
            times.get()
        latencies = []
        for number in range(num_latencies):
            await run_to_end(cluster, make_request(f"small{number}", 16, 2))
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
            await run_to_end(cluster, make_request(f"long{number}", 2048, 2))
        texts = await cluster.controller.metrics()
    num_prompts = int(_sum_of("pdserve_kv_early_share_count", texts))
    return _sum_of("pdserve_kv_early_share_sum", texts) / num_prompts, num_prompts


def _sum_of(name: str, texts: list[str]) -> float:
    lines = [line for text in texts for line in text.splitlines()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} "))
