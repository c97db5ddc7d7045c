"""What long prompts do to running streams: one prefill and one decode worker against two mixed workers.

    python -m pdserve.benchmarks.interference [--model demo] [--seconds 40] [--repeats 2] [--budgets 64 128 256 512]

The same two cores, one worker each. A steady load of decoding streams (32 prompt tokens, 400 new ones, started again as
they end) and long prompts that arrive at fixed times (open loop), greedy, end tokens ignored. Mixed workers run with
each step budget; the prefill worker takes 512 tokens a step. Reported: time to first token of the long prompts, gaps
between tokens of the streams, output rate. Configurations take turns (A B C … A B C …).
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.local_cluster import LocalCluster, WorkerPlan, running_cluster
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.source import prepare_model

STREAM_PROMPT, STREAM_TOKENS = 32, 400
LONG_TOKENS = 8
SETTLE_S = 5.0


@dataclass
class Seen:
    """What one configuration's clients saw."""

    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    duration_s: float = 0.0


def make_engine(folder: Path, budget: int) -> tuple[Engine, KVStore]:
    """Return an engine on one thread."""
    config = EngineConfig(max_batch_tokens=budget, kv_memory_gib=0.7, prefix_cache=False)
    assembled = assemble_engine(
        folder, config, max_model_len=None, num_threads=1, clock=SystemClock(), promised_share=0.5
    )
    return assembled.engine, assembled.store


def plans_of(folder: Path, budget: int | None) -> list[WorkerPlan]:
    """Return the workers of a configuration: mixed ones with a budget, or one prefill and one decode worker."""
    if budget is not None:
        make = partial(make_engine, folder, budget)
        return [WorkerPlan(role=Role.MIXED, make_engine=make, core=core) for core in (0, 1)]
    return [
        WorkerPlan(role=Role.PREFILL, make_engine=partial(make_engine, folder, 512), core=0),
        WorkerPlan(role=Role.DECODE, make_engine=partial(make_engine, folder, 128), core=1),
    ]


class Load:
    """Runs the load on one cluster."""

    def __init__(self, cluster: LocalCluster, *, num_streams: int, long_prompt: int, interval_s: float) -> None:
        self._replayer = cluster.replayer
        self._num_streams = num_streams
        self._long_prompt = long_prompt
        self._interval_s = interval_s
        self._random = np.random.default_rng(5)
        self._num_requests = 0
        self._start_time = 0.0
        self._end_time = 0.0
        self.seen = Seen()

    async def run(self, seconds: float) -> Seen:
        """Let it settle, measure for `seconds`."""
        streams = [asyncio.create_task(self._stream()) for _ in range(self._num_streams)]
        await asyncio.sleep(SETTLE_S)
        self._start_time = time.perf_counter()
        self._end_time = self._start_time + seconds
        longs = []
        for number in range(int(seconds / self._interval_s)):
            intended_time = self._start_time + number * self._interval_s
            await asyncio.sleep(max(0.0, intended_time - time.perf_counter()))
            longs.append(asyncio.create_task(self._long(intended_time)))
        await asyncio.gather(*longs)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        self.seen.duration_s = seconds
        return self.seen

    def _request(self, num_prompt: int, num_new: int) -> Request:
        self._num_requests += 1
        return Request(
            request_id=RequestId(f"r{self._num_requests}"),
            attempt=0,
            prompt_token_ids=(2, *self._random.integers(1000, 20000, num_prompt - 1).tolist()),
            sampling=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
        )

    def _count(self, num_tokens: int) -> None:
        if self._start_time <= time.perf_counter() < self._end_time:
            self.seen.num_tokens += num_tokens

    async def _stream(self) -> None:
        while True:
            last_time: float | None = None
            async with self._replayer.open(self._request(STREAM_PROMPT, STREAM_TOKENS)) as run:
                async for delta in run:
                    now = time.perf_counter()
                    if last_time is not None and self._start_time and last_time >= self._start_time:
                        self.seen.gaps_s.append(now - last_time)
                    last_time = now
                    self._count(len(delta.token_ids))

    async def _long(self, intended_time: float) -> None:
        is_first = True
        async with self._replayer.open(self._request(self._long_prompt, LONG_TOKENS)) as run:
            async for delta in run:
                if is_first:
                    self.seen.ttfts_s.append(time.perf_counter() - intended_time)
                    is_first = False
                self._count(len(delta.token_ids))


def describe(found: Seen) -> dict[str, float]:
    """Return the figures of one run."""
    return {
        "ttft_p50_ms": round(1000 * float(np.percentile(found.ttfts_s, 50)), 1),
        "ttft_p95_ms": round(1000 * float(np.percentile(found.ttfts_s, 95)), 1),
        "gap_p50_ms": round(1000 * float(np.percentile(found.gaps_s, 50)), 1),
        "gap_p99_ms": round(1000 * float(np.percentile(found.gaps_s, 99)), 1),
        "gap_max_ms": round(1000 * max(found.gaps_s), 1),
        "tokens_per_s": round(found.num_tokens / found.duration_s, 1),
    }


async def measure(folder: Path, budget: int | None, options: argparse.Namespace) -> dict[str, float]:
    """Run one configuration once."""
    async with running_cluster(plans_of(folder, budget), TransferConfig()) as cluster:
        load = Load(cluster, num_streams=options.streams, long_prompt=options.long_prompt, interval_s=options.interval)
        return describe(await load.run(options.seconds))


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long-prompt", type=int, default=1024)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two long prompts")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    options = parser.parse_args(arguments)
    folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
    configurations: list[int | None] = [None, *options.budgets]
    runs: dict[int | None, list[dict[str, float]]] = {budget: [] for budget in configurations}
    for _ in range(options.repeats):
        for budget in configurations:
            runs[budget].append(asyncio.run(measure(folder, budget, options)))
    rows = []
    print(
        f"{'milliseconds':<22}{'TTFT p50':>10}{'p95':>9}{'gap p50':>10}{'p99':>9}{'max':>9}{'spread':>18}{'tok/s':>8}"
    )
    for budget in configurations:
        name = "1 prefill + 1 decode" if budget is None else f"2 mixed, budget {budget}"
        median = {key: float(np.median([run[key] for run in runs[budget]])) for key in runs[budget][0]}
        worst = [run["gap_max_ms"] for run in runs[budget]]
        rows.append({"configuration": name, **median, "gap_max_spread_ms": [min(worst), max(worst)]})
        print(
            f"{name:<22}{median['ttft_p50_ms']:>10.0f}{median['ttft_p95_ms']:>9.0f}{median['gap_p50_ms']:>10.1f}"
            f"{median['gap_p99_ms']:>9.1f}{median['gap_max_ms']:>9.1f}"
            f"{f'{min(worst):.0f}-{max(worst):.0f}':>18}{median['tokens_per_s']:>8.1f}"
        )
    setting = {key: value for key, value in vars(options).items() if key != "model"}
    print(json.dumps({"benchmark": "interference", **setting, "rows": rows, **describe_environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
