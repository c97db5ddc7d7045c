"""What preemption costs as the KV pool shrinks, for each way to bring a sequence back.

    python -m pdserve.benchmarks.preemption [--model demo] [--requests 24] [--shares 1.0 0.7 0.5 0.35 0.25]
        [--repeats 2] [--plot FILE.svg]

All requests (prompts of 64 to 256 tokens, 96 more each) arrive at once. A pool of share 1 holds them all; in smaller
ones sequences are put back and come back by computing everything again, from what is left in the prefix cache, or by
copies from the host tier. The ways take turns (A B C A B C …). Texts must be equal everywhere. Prints throughput
against the same way at the largest share, preemptions, and what was computed again as a share of all tokens, and one
JSON line; counts are those of the last repeat.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import AssembledEngine, assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.sequence import blocks_for
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.runner import TransformerRunner
from pdserve.workers.model.source import prepare_model

NEW_TOKENS = 96
BLOCK_SIZE = 16
MAX_BATCH_TOKENS = 256
THREADS = 2

Row = dict[str, Any]
"""What was found of one way at one share; as in the JSON line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a sequence that was put back comes back."""

    name: str
    has_prefix_cache: bool
    has_host_tier: bool


WAYS = (
    Way(name="recompute", has_prefix_cache=False, has_host_tier=False),
    Way(name="prefix cache", has_prefix_cache=True, has_host_tier=False),
    Way(name="host tier", has_prefix_cache=True, has_host_tier=True),
)


def make_requests(count: int) -> list[Request]:
    """Return requests that share nothing."""
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return [
        Request(
            request_id=RequestId(str(number)),
            attempt=0,
            prompt_token_ids=tuple(rng.randrange(1000, 20000) for _ in range(rng.randint(64, 256))),
            sampling=sampling,
        )
        for number in range(count)
    ]


def make_engine(assembled: AssembledEngine, num_blocks: int, way: Way) -> Engine:
    """Return an engine on the loaded model, with `num_blocks` in each KV group."""
    layout = assembled.store.layout
    counts = [num_blocks] * len(layout.groups)
    store = KVStore(layout, num_blocks=counts, device=assembled.store.layer(0).device)
    runner = TransformerRunner(assembled.model, store, num_threads=THREADS)
    runner.bind_thread()
    settings = SchedulerSettings(
        block_size=BLOCK_SIZE,
        max_running=64,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_waiting=1000,
        max_model_len=num_blocks * BLOCK_SIZE,
        has_prefix_cache=way.has_prefix_cache,
    )
    host = HostTier(store, [num_blocks * 8] * len(counts), SystemClock()) if way.has_host_tier else None
    engine = Engine(settings, runner, layout=layout, num_blocks=counts, clock=SystemClock(), host=host)
    engine.times = assembled.engine.times
    return engine


def run(engine: Engine, requests: list[Request]) -> tuple[float, dict[str, list[int]]]:
    """Run requests that arrive at once; return seconds and texts."""
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    start_time = time.perf_counter()
    for request in requests:
        engine.scheduler.add(request)
    while engine.has_work:
        for delta in engine.step():
            texts[delta.request_id].extend(delta.token_ids)
    return time.perf_counter() - start_time, texts


def main() -> None:
    """Measure every way at every share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.7, 0.5, 0.35, 0.25])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    folder = prepare_model(arguments.model, cache_dir(), lambda stage, share: None)
    config = EngineConfig(kv_memory_gib=0.2, block_size=BLOCK_SIZE, max_batch_tokens=MAX_BATCH_TOKENS)
    assembled = assemble_engine(folder, config, max_model_len=None, num_threads=THREADS, clock=SystemClock())
    found = measure(assembled, make_requests(arguments.requests), sorted(arguments.shares, reverse=True), arguments)
    report(found)
    if arguments.plot:
        plot(arguments.plot, found)


def measure(
    assembled: AssembledEngine, requests: list[Request], shares: list[float], arguments: argparse.Namespace
) -> list[Row]:
    """Run all requests at every share in every way; return a row for each."""
    needed = [len(request.prompt_token_ids) + NEW_TOKENS for request in requests]
    ample = sum(blocks_for(count, BLOCK_SIZE) for count in needed)
    print(f"{len(requests)} requests, {sum(needed)} tokens, {ample} blocks hold them all")
    seconds: dict[tuple[str, float], list[float]] = {}
    counts: dict[tuple[str, float], Row] = {}
    expected: dict[str, list[int]] | None = None
    for _ in range(arguments.repeats):
        for share in shares:
            for way in WAYS:
                engine = make_engine(assembled, max(int(share * ample), blocks_for(max(needed), BLOCK_SIZE)), way)
                duration, texts = run(engine, requests)
                if expected is not None and texts != expected:
                    raise RuntimeError(f"{way.name} at {share}: other texts")
                expected = texts
                seconds.setdefault((way.name, share), []).append(duration)
                counts[way.name, share] = {
                    "preemptions": engine.scheduler.num_preemptions,
                    "recomputed_share": round(engine.scheduler.num_recomputed_tokens / sum(needed), 4),
                    "loaded_blocks": 0 if engine.host is None else engine.host.num_loaded_blocks,
                }
    rows = []
    for (name, share), values in seconds.items():
        base = statistics.median(seconds[name, shares[0]])
        throughput = {
            "throughput": round(base / statistics.median(values), 3),
            "throughput_min": round(base / max(values), 3),
            "throughput_max": round(base / min(values), 3),
        }
        rows.append({"share": share, "way": name, **counts[name, share], **throughput})
    return rows


def report(found: list[Row]) -> None:
    """Print the table and the JSON line."""
    print("share  way            preemptions  computed again  copied back  throughput (min-max)")
    for row in found:
        print(
            f"{row['share']:5.2f}  {row['way']:13} {row['preemptions']:12} {row['recomputed_share']:15.1%}"
            f" {row['loaded_blocks']:12}  {row['throughput']:.2f}"
            f" ({row['throughput_min']:.2f}-{row['throughput_max']:.2f})"
        )
    print(json.dumps({"benchmark": "preemption", "found": found, **describe_environment()}))


def plot(path: Path, found: list[Row]) -> None:
    """Draw throughput by share."""
    from pdserve.benchmarks.plots import save_line_chart

    by_way = {way.name: [row for row in found if row["way"] == way.name] for way in WAYS}
    save_line_chart(
        path,
        {name: ([row["share"] for row in rows], [row["throughput"] for row in rows]) for name, rows in by_way.items()},
        title="Throughput as the KV pool shrinks",
        x_label="pool, as a share of what all requests need",
        y_label="throughput against the largest pool",
    )


if __name__ == "__main__":
    main()
