"""Joint placement: what a decision costs, and what it is worth against the least-loaded workers.

    python -m pdserve.benchmarks.routing [--trace TRACE.jsonl[.gz]] [--requests 500] [--repeats 2] [--speed 3.5]

1. *decisions*: microseconds of a decision, and of taking a report in, with 10 to 1000 workers, half of them prefill
   workers, a prompt of 1024 tokens, nothing cached. In turns with the baseline.
2. *replay* of the beginning of a trace in Mooncake's format (kvcache-ai/Mooncake, FAST25-release/traces): three prefill
   and two decode workers, real services in processes of their own over real channels and links, whose engines keep the
   pace of a law instead of computing (so that five fit two cores); prompts, texts and blocks are a sixteenth of the
   trace's. The two policies take turns (A B A B); times from when a request was due.
"""

import argparse
import asyncio
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.local_cluster import LocalCluster, WorkerPlan, running_cluster
from pdserve.benchmarks.paced_engine import Pace, make_paced_engine, tokens_of
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import PlacementConfig, TransferConfig, TransportKind
from pdserve.cluster.base.ids import Incarnation, RequestId, WorkerId
from pdserve.cluster.base.prefix_hash import PrefixIdentity, unit_chain
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.cluster.base.route import Placeable, PrefixChain
from pdserve.cluster.base.worker_info import (
    Endpoint,
    NumericsClass,
    Role,
    StepFit,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    WorkerView,
)
from pdserve.cluster.control.least_loaded import LeastLoaded
from pdserve.cluster.control.placement import JointPlacement, Placement

SHRINK = 16
BLOCK_TOKENS = 512 // SHRINK
LAW = StepFit(base=0.004, per_token=0.0002, per_row=0.0002, per_context_kilotoken=0.001, per_kilopair=0.00002)
PREFILL = Pace(law=LAW, max_batch_tokens=512, num_blocks=1200)
DECODE = Pace(law=LAW, max_batch_tokens=128, num_blocks=2400)
NUM_DECISIONS = 400
IDENTITY = PrefixIdentity(model_digest="m", kv_dtype="float32", numerics_digest="n")


def make_joint() -> Placement:
    """Return the joint placement with its defaults."""
    return JointPlacement(PlacementConfig(), SystemClock(), random.Random(1))


POLICIES: dict[str, Callable[[], Placement]] = {"joint": make_joint, "least loaded": LeastLoaded}


# Decisions.


def make_view(number: int, rng: random.Random) -> WorkerView:
    """Return a worker with some load."""
    role = Role.PREFILL if number % 2 else Role.DECODE
    info = WorkerInfo(
        worker_id=WorkerId(f"{role}-{number}"),
        incarnation=Incarnation(str(number)),
        role=role,
        endpoint=Endpoint(host="127.0.0.1", port=1),
        pid=1,
        device="cpu",
        model_name="m",
        model_digest="m",
        numerics_digest="n",
        numerics_class=NumericsClass.BITWISE,
        numerics_note="",
        vocab_size=1,
        max_model_len=1 << 17,
        num_blocks=10_000,
        block_size=16,
        max_running=64,
        max_batch_tokens=512,
        prefix_identity=IDENTITY,
        kv_token_bytes=1 << 16,
        memory_bytes=1,
    )
    load = WorkerLoad(
        num_running=rng.randrange(32),
        num_queued_prompt_tokens=rng.randrange(4000),
        num_context_tokens=rng.randrange(30_000),
        num_free_blocks=rng.randrange(1000, 10_000),
        num_blocks=10_000,
        step_fit=replace(LAW, num_observations=100.0, relative_error=0.1),
    )
    return WorkerView(info=info, state=WorkerState.READY, load=load)


def time_decisions(make: Callable[[], Placement], num_workers: int) -> dict[str, float]:
    """Return microseconds: the median and the 95th percentile of a decision, the median of a report."""
    rng, placement = random.Random(2), make()
    views = [make_view(number, rng) for number in range(num_workers)]
    for view in views:
        placement.updated(view)
    chosen, reported = [], []
    for number in range(NUM_DECISIONS):
        names = unit_chain(IDENTITY, range(number, number + 1024))
        request = Placeable(
            request_id=RequestId(str(number)),
            attempt=0,
            num_tokens=1024,
            max_tokens=200,
            chains=(PrefixChain(identity=IDENTITY, names=names),),
        )
        start = time.perf_counter()
        placement.choose(request)
        middle = time.perf_counter()
        placement.updated(rng.choice(views))
        reported.append(time.perf_counter() - middle)
        chosen.append(middle - start)
    return {
        "decision_us": round(statistics.median(chosen) * 1e6, 1),
        "decision_us_p95": round(float(np.percentile(chosen, 95)) * 1e6, 1),
        "report_us": round(statistics.median(reported) * 1e6, 1),
    }


# Replay.


@dataclass(frozen=True, slots=True)
class Traced:
    """A request of the trace, and when it is due."""

    due_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client saw of one."""

    ttft_s: float
    duration_s: float
    num_cached: int


def read_trace(path: Path, num_requests: int, speed: float) -> list[Traced]:
    """Return the first requests, a sixteenth of their length."""
    traced = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in zip(range(num_requests), lines, strict=False):
            entry = json.loads(line)
            ids = [token for hash_id in entry["hash_ids"] for token in tokens_of(hash_id, BLOCK_TOKENS)]
            request = Request(
                request_id=RequestId(f"t{number}"),
                attempt=0,
                prompt_token_ids=tuple(ids[: max(1, entry["input_length"] // SHRINK)]),
                sampling=SamplingParams(
                    max_tokens=max(1, entry["output_length"] // SHRINK), temperature=0.0, ignore_eos=True
                ),
            )
            traced.append(Traced(entry["timestamp"] / 1000 / speed, request))
    return traced


async def run_one(cluster: LocalCluster, traced: Traced, start_time: float) -> Seen:
    """Send a request when it is due."""
    due_time = start_time + traced.due_s
    await asyncio.sleep(max(0.0, due_time - time.perf_counter()))
    first_time, num_cached = 0.0, 0
    async with cluster.replayer.open(traced.request) as run:
        async for delta in run:
            first_time = first_time or time.perf_counter()
            num_cached = max(num_cached, delta.num_cached_tokens)
    return Seen(first_time - due_time, time.perf_counter() - due_time, num_cached)


async def replay(policy: str, trace: list[Traced], transfer: TransferConfig) -> dict[str, float]:
    """Run the trace by a policy."""
    plans = [
        WorkerPlan(role=role, make_engine=partial(make_paced_engine, pace), core=number % 2)
        for number, (role, pace) in enumerate([(Role.PREFILL, PREFILL)] * 3 + [(Role.DECODE, DECODE)] * 2)
    ]
    async with running_cluster(plans, transfer, POLICIES[policy]()) as cluster:
        first = replace(trace[0].request, request_id=RequestId("first"))
        await run_one(cluster, Traced(0.0, first), time.perf_counter())
        start_time = time.perf_counter()
        seen = await asyncio.gather(*(run_one(cluster, traced, start_time) for traced in trace))
    ttfts, durations = ([getattr(one, name) for one in seen] for name in ("ttft_s", "duration_s"))
    num_prompt_tokens = sum(len(traced.request.prompt_token_ids) for traced in trace)
    return {
        "ttft_p50": round(float(np.percentile(ttfts, 50)), 3),
        "ttft_p90": round(float(np.percentile(ttfts, 90)), 3),
        "ttft_p99": round(float(np.percentile(ttfts, 99)), 3),
        "ttft_mean": round(statistics.mean(ttfts), 3),
        "duration_mean": round(statistics.mean(durations), 3),
        "cached_share": round(sum(one.num_cached for one in seen) / num_prompt_tokens, 3),
    }


def _cells(found: dict[str, float]) -> str:
    return "".join(f"  {name} {value}" for name, value in found.items())


def main(arguments: list[str]) -> int:
    """Measure; print tables, then a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--speed", type=float, default=3.5, help="how much faster than the trace requests come")
    options = parser.parse_args(arguments)
    decisions, replays = [], []
    for num_workers in (10, 100, 1000):
        for policy, make in POLICIES.items():
            found = time_decisions(make, num_workers)
            decisions.append({"workers": num_workers, "policy": policy, **found})
            print(
                f"{num_workers:5} workers  {policy:13}" + "".join(f"  {name} {value}" for name, value in found.items())
            )
    if options.trace is not None:
        trace = read_trace(options.trace, options.requests, options.speed)
        print(f"{len(trace)} requests in {trace[-1].due_s:.0f} s")
        transfer = TransferConfig(transports=(TransportKind.TCP,), slot_bytes=256 << 10)
        for _ in range(options.repeats):
            for policy in POLICIES:
                seen = asyncio.run(replay(policy, trace, transfer))
                replays.append({"policy": policy, **seen})
                print(f"{policy:13}{_cells(seen)}", flush=True)
    print(json.dumps({"benchmark": "routing", "decisions": decisions, "replay": replays, **describe_environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
