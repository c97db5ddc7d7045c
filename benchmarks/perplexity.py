"""How much a kind of weights and KV costs in accuracy: perplexity of a model on a text of ours.

    python -m pdserve.benchmarks.perplexity [--model demo] [--kinds fp32 fp16 int8 fp16+int8 int8+int8]

A kind is engine.linear, or engine.linear+engine.kv_dtype.

Prints a table and one JSON line. Perplexity is exp of the mean negative log probability of each token after all before
it, in one sequence, through the engine as it serves.
"""

import argparse
import json
import math
from pathlib import Path

from transformers import AutoTokenizer

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.kinds import parse_kind
from pdserve.benchmarks.sample_text import TEXT
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.model.source import prepare_model


def measure_perplexity(engine: Engine, token_ids: list[int]) -> float:
    """Return the perplexity of a text's tokens, the first one given."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=0)
    engine.scheduler.add(
        Request(request_id=RequestId("text"), attempt=0, prompt_token_ids=tuple(token_ids), sampling=sampling)
    )
    while engine.has_work:
        for delta in engine.step():
            total = sum(entry.chosen.logprob for entry in delta.prompt_logprobs)
            return math.exp(-total / len(delta.prompt_logprobs))
    raise AssertionError("a request ends with a token")


def main() -> None:
    """Measure each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kinds", nargs="+", default=["fp32", "fp16", "int8", "fp16+int8", "int8+int8"])
    arguments = parser.parse_args()
    folder: Path = prepare_model(arguments.model, cache_dir(), lambda stage, share: None)
    token_ids = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)(TEXT).input_ids
    found: dict[str, float] = {}
    print(f"weights+KV  perplexity over {len(token_ids)} tokens   against the first")
    for name in arguments.kinds:
        linear, kv_dtype = parse_kind(name)
        config = EngineConfig(linear=linear, kv_dtype=kv_dtype, kv_memory_gib=0.2)
        assembled = assemble_engine(folder, config, max_model_len=None, num_threads=2, clock=SystemClock())
        found[name] = measure_perplexity(assembled.engine, token_ids)
        ratio = found[name] / next(iter(found.values()))
        print(f"{name:10}  {found[name]:10.3f}   {ratio:.4f}   {assembled.numerics.numerics_class.value}", flush=True)
    print(json.dumps({"benchmark": "perplexity", "tokens": len(token_ids), "found": found, **describe_environment()}))


if __name__ == "__main__":
    main()
