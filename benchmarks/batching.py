"""Static batches against iteration-level batching, on outputs of heavy-tailed lengths.

    python -m pdserve.benchmarks.batching [--model demo] [--batch 4 8 16 32] [--requests 1024] [--timed 64]
        [--repeats 3] [--plot FILE.svg]

A static batch ends with its longest request; iteration-level batching (Orca, OSDI 2022) fills a place as soon as one is
free. Both run on our engine; the static side submits the next batch when the last is done. Where a step takes as long
whatever its size (a large model on an accelerator), the ratio of throughputs is the ratio of steps: about the mean of
the largest of B lengths over the mean length. Steps are counted on the digest model with `--requests`. Times are taken
on the real model with `--timed` of them where they fill a batch at least eight times, beside the ratio of their steps:
on a CPU small steps are cheaper, so the ratio of times is lower than that. Interleaved repeats (A B A B …). Prompts of
16 tokens; lengths are lognormal (median 24, sigma 1.0, at most 200).
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.model.digest import DigestModel, DigestRunner
from pdserve.workers.model.source import prepare_model

Row = dict[str, Any]
"""What was found at one batch size; as in the JSON line."""

PROMPT_TOKENS = 16
MEDIAN, SIGMA, LONGEST = 24, 1.0, 200


def make_lengths(count: int) -> list[int]:
    """Return heavy-tailed output lengths."""
    rng = random.Random(1)
    return [max(1, min(LONGEST, round(MEDIAN * rng.lognormvariate(0.0, SIGMA)))) for _ in range(count)]


def make_requests(lengths: list[int], attempt: int) -> list[Request]:
    """Return a request per length."""
    rng = random.Random(2)
    return [
        Request(
            request_id=RequestId(str(number)),
            attempt=attempt,
            prompt_token_ids=tuple(rng.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for number, length in enumerate(lengths)
    ]


def run_static(engine: Engine, requests: list[Request], batch: int) -> None:
    """Run requests in batches; each waits for the last of the one before."""
    for first in range(0, len(requests), batch):
        for request in requests[first : first + batch]:
            engine.scheduler.add(request)
        while engine.has_work:
            engine.step()


def run_iterations(engine: Engine, requests: list[Request], batch: int) -> None:
    """Run requests, at most `batch` at once."""
    waiting = requests[::-1]
    num_running = 0
    while waiting or num_running:
        while waiting and num_running < batch:
            engine.scheduler.add(waiting.pop())
            num_running += 1
        num_running -= sum(delta.finish_reason is not None for delta in engine.step())


WAYS = (run_static, run_iterations)


def count_steps(lengths: list[int], batch: int) -> list[int]:
    """Return the steps of both ways, on the digest model."""
    model = DigestModel()
    layout = model.layout(PROMPT_TOKENS)
    settings = SchedulerSettings(
        block_size=layout.block_size, max_running=64, max_batch_tokens=2048, max_waiting=64, max_model_len=512
    )
    counts = []
    for way in WAYS:
        num_blocks = (2048, 2048)
        runner = DigestRunner(model, num_blocks=num_blocks, block_size=layout.block_size)
        engine = Engine(settings, runner, layout=layout, num_blocks=num_blocks, clock=SystemClock())
        way(engine, make_requests(lengths, 0), batch)
        counts.append(engine.num_steps)
    return counts


def time_ratios(engine: Engine, lengths: list[int], batch: int, repeats: int) -> list[float]:
    """Return static over iteration-level seconds, one for each pair of runs."""
    ratios = []
    for repeat in range(repeats):
        seconds = []
        for number, way in enumerate(WAYS):
            requests = make_requests(lengths, len(WAYS) * repeat + number)
            start_time = time.perf_counter()
            way(engine, requests, batch)
            seconds.append(time.perf_counter() - start_time)
        ratios.append(seconds[0] / seconds[1])
    return sorted(ratios)


def main() -> None:
    """Compare at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--timed", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    folder = prepare_model(arguments.model, cache_dir(), lambda stage, share: None)
    config = EngineConfig(kv_memory_gib=0.5, prefix_cache=False)
    engine = assemble_engine(folder, config, max_model_len=None, num_threads=2, clock=SystemClock()).engine
    lengths = make_lengths(arguments.requests)
    mean = statistics.mean(lengths)
    found = []
    print(f"{len(lengths)} outputs, mean {mean:.1f} tokens, longest {max(lengths)}; times of {arguments.timed}")
    print("   B  steps static  iteration  ratio  E[max of B]/mean  timed: ratio of steps, of times (min-max)")
    for batch in arguments.batch:
        static, iterations = count_steps(lengths, batch)
        largest = [max(lengths[first : first + batch]) for first in range(0, len(lengths), batch)]
        row: Row = {
            "batch": batch,
            "steps_static": static,
            "steps_iteration": iterations,
            "step_ratio": round(static / iterations, 3),
            "max_over_mean": round(statistics.mean(largest) / mean, 3),
        }
        line = f"{batch:4}  {static:12}  {iterations:9}  {row['step_ratio']:5.2f}  {row['max_over_mean']:16.2f}"
        if batch * 8 <= arguments.timed:
            timed = lengths[: arguments.timed]
            timed_static, timed_iterations = count_steps(timed, batch)
            ratios = time_ratios(engine, timed, batch, arguments.repeats)
            row |= {
                "timed_step_ratio": round(timed_static / timed_iterations, 3),
                "time_ratio": round(statistics.median(ratios), 3),
                "time_ratio_min": round(ratios[0], 3),
                "time_ratio_max": round(ratios[-1], 3),
            }
            spread = f"{row['time_ratio_min']:.2f}-{row['time_ratio_max']:.2f}"
            line += f"  {row['timed_step_ratio']:.2f}  {row['time_ratio']:.2f} ({spread})"
        found.append(row)
        print(line, flush=True)
    if arguments.plot:
        plot(arguments.plot, found)
    print(json.dumps({"benchmark": "batching", "mean": mean, "found": found, **describe_environment()}))


def plot(path: Path, found: list[Row]) -> None:
    """Draw the ratios by batch size."""
    from pdserve.benchmarks.plots import save_line_chart

    names = {
        "step_ratio": "steps",
        "max_over_mean": "E[max of B] / mean",
        "timed_step_ratio": "steps of the timed requests",
        "time_ratio": "their time on CPU",
    }
    series = {}
    for key, text in names.items():
        rows = [row for row in found if key in row]
        series[text] = ([row["batch"] for row in rows], [row[key] for row in rows])
    save_line_chart(
        path,
        series,
        title="What static batches cost against iteration-level batching",
        x_label="places in the batch",
        y_label="static / iteration-level",
        dashed=["E[max of B] / mean"],
    )


if __name__ == "__main__":
    main()
