"""What scheduling costs: schedule and update of a decode step, without a model.

    python -m pdserve.benchmarks.scheduler [--steps 400] [--repeats 5]

Prints a table and one JSON line. The limits are those of the design: 50 µs a step at 1 sequence, 1 ms at 256.
"""

import argparse
import json
import statistics
import time

import numpy as np

from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.prefix_hash import PrefixIdentity
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.plan import StepOutput
from pdserve.workers.engine.scheduler import Scheduler, SchedulerSettings

PROMPT_TOKENS = 64
LIMITS_US = {1: 50.0, 16: None, 64: None, 256: 1000.0}
LAYOUT = KVLayout(
    model_digest="benchmark",
    kv_dtype=KVDtype.FLOAT32,
    block_size=16,
    num_kv_heads=1,
    head_dim=256,
    groups=(GroupLayout(window=512, layers=(0, 1, 2, 3, 4)), GroupLayout(window=0, layers=(5,))),
)
"""Two groups, one of them with a window, as the demo model has."""


def measure(num_sequences: int, num_steps: int) -> float:
    """Return the mean microseconds that the scheduler takes for a decode step of `num_sequences`."""
    worst = PROMPT_TOKENS + num_steps + 8
    num_blocks = num_sequences * (worst // LAYOUT.block_size + 2)
    settings = SchedulerSettings(
        block_size=LAYOUT.block_size,
        max_running=num_sequences,
        max_batch_tokens=num_sequences * PROMPT_TOKENS,
        max_waiting=num_sequences,
        max_model_len=worst,
    )
    identity = PrefixIdentity(model_digest="benchmark", kv_dtype=KVDtype.FLOAT32, numerics_digest="")
    pool = BlockPool([num_blocks] * len(LAYOUT.groups))
    scheduler = Scheduler(
        settings, pool, LAYOUT, identity, SystemClock(), copy_block=lambda group, source, target: None
    )
    generator = np.random.default_rng(0)
    for number in range(num_sequences):
        prompt = tuple(generator.integers(10, 50000, PROMPT_TOKENS).tolist())
        sampling = SamplingParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True)
        scheduler.add(Request(request_id=RequestId(str(number)), attempt=0, prompt_token_ids=prompt, sampling=sampling))
    spent = 0
    for step in range(num_steps + 1):
        start = time.perf_counter_ns()
        plan = scheduler.schedule()
        planned = time.perf_counter_ns()
        assert plan is not None, "there is work"
        output = StepOutput(token_ids=generator.integers(10, 50000, len(plan.sample_rows)).astype(np.int32))
        begun = time.perf_counter_ns()
        scheduler.update(output)
        if step:  # the first one prefills
            spent += planned - start + time.perf_counter_ns() - begun
    return spent / num_steps / 1000


def main() -> None:
    """Measure each batch size a few times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = {}
    print("sequences   µs a step (median, spread)   limit")
    for num_sequences, limit in LIMITS_US.items():
        found = [measure(num_sequences, arguments.steps) for _ in range(arguments.repeats)]
        results[num_sequences] = {"median_us": statistics.median(found), "min_us": min(found), "max_us": max(found)}
        shown = "" if limit is None else f"{limit:g}"
        print(f"{num_sequences:9}   {statistics.median(found):8.1f}  ({min(found):.1f}-{max(found):.1f})   {shown}")
    print(json.dumps({"benchmark": "scheduler", "steps": arguments.steps, "us": results, **describe_environment()}))


if __name__ == "__main__":
    main()
