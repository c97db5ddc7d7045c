"""Many short requests on a tiny model: memory and step time must stay flat.

    python -m pdserve.benchmarks.soak [--requests 20000] [--concurrency 32]

Requests share prefixes, fork, draw with every parameter, and a tenth is aborted, over a pool small enough to preempt,
with a host tier. Memory is RssAnon + VmSwap: resident size alone looks flat where leaked pages are swapped out.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.gpu_models import SMALL, save_random
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams, TokenBias
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine

NUM_WINDOWS = 10
KV_GIB, HOST_GIB = 0.0016, 0.008
MAX_MODEL_LEN = 256


def private_mib() -> float:
    """Return RssAnon + VmSwap of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


def make_request(number: int, rng: random.Random, prefixes: list[list[int]]) -> Request:
    """Return one request of the mix."""
    prompt = rng.choice(prefixes)[: rng.randint(1, 60)] + [rng.randint(10, 500) for _ in range(rng.randint(1, 12))]
    is_plain = rng.random() < 0.6
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 12),
        temperature=0.0 if is_plain else 0.9,
        top_p=1.0 if is_plain else 0.9,
        seed=number,
        frequency_penalty=0.0 if is_plain else 0.3,
        logit_bias=() if is_plain else (TokenBias(token_id=20, bias=1.0),),
        num_logprobs=None if is_plain else 2,
        ignore_eos=True,
    )
    forks = tuple(RequestId(f"{number}.{sample}") for sample in range(1, 3)) if rng.random() < 0.05 else ()
    return Request(
        request_id=RequestId(str(number)), attempt=0, prompt_token_ids=tuple(prompt), forks=forks, sampling=sampling
    )


def run_window(engine: Engine, first: int, count: int, concurrency: int, rng: random.Random) -> dict[str, float]:
    """Run `count` requests with at most `concurrency` at once; return what the window measured."""
    prefixes = [[rng.randint(10, 500) for _ in range(60)] for _ in range(20)]
    numbers = iter(range(first, first + count))
    start_time, steps_before, num_tokens = time.perf_counter(), engine.num_steps, 0
    is_last = False
    while engine.has_work or not is_last:
        while not is_last and engine.scheduler.num_running + engine.scheduler.num_waiting < concurrency:
            number = next(numbers, None)
            if number is None:
                is_last = True
            else:
                engine.scheduler.add(make_request(number, rng, prefixes))
                if rng.random() < 0.1:
                    engine.scheduler.abort(RequestId(str(rng.randint(max(0, number - 20), number))), 0)
        num_tokens += len(engine.step())
    duration_s = time.perf_counter() - start_time
    assert engine.pool.is_all_free, "LEAK"
    engine.scheduler.validate()
    return {
        "requests": first + count,
        "mib": round(private_mib(), 1),
        "step_ms": round(1000 * duration_s / (engine.num_steps - steps_before), 3),
        "tokens_per_s": round(num_tokens / duration_s, 1),
        "preemptions": engine.scheduler.num_preemptions,
    }


def main() -> None:
    """Run the windows and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--concurrency", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder), "gemma3", SMALL)
        config = EngineConfig(kv_memory_gib=KV_GIB, host_memory_gib=HOST_GIB, max_running=32)
        assembled = assemble_engine(
            Path(folder), config, max_model_len=MAX_MODEL_LEN, num_threads=1, clock=SystemClock()
        )
        rng = random.Random(1)
        size = arguments.requests // NUM_WINDOWS
        windows = []
        for window in range(NUM_WINDOWS):
            windows.append(run_window(assembled.engine, window * size, size, arguments.concurrency, rng))
            print("  ".join(f"{name} {value}" for name, value in windows[-1].items()), flush=True)
    later = windows[1:]
    growth = later[-1]["mib"] - later[0]["mib"]
    drift = later[-1]["step_ms"] / later[0]["step_ms"]
    print(f"from the second window to the last: memory {growth:+.1f} MiB, step time x {drift:.2f}")
    print(json.dumps({"benchmark": "soak", "windows": windows, **describe_environment()}))


if __name__ == "__main__":
    main()
