"""Engine throughput against transformers' continuous batching, in one process, on one model.

    python -m pdserve.benchmarks.engine_throughput [--model demo] [--threads 2] [--repeats 3] [--batch 1 8 32]
        [--linear fp32 fp16 int8]

All N requests (128 prompt + 64 new tokens, greedy, end tokens ignored) are submitted at once; output tokens per second,
prefill included, without prefix caches. Repeats are interleaved (A B A B …). Prints a table and one JSON line; ratios
are of medians, with the spread of each side. The peer runs fp32, its only exact precision on CPU.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import EngineConfig, LinearKind, cache_dir
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import assemble_engine
from pdserve.workers.model.source import prepare_model

PROMPT_TOKENS = 128
NEW_TOKENS = 64


class Contender(Protocol):
    """One engine under test."""

    name: str

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generate NEW_TOKENS greedy tokens for each prompt."""


class PdserveContender:
    """Our engine, driven directly."""

    def __init__(self, folder: Path, linear: LinearKind, threads: int) -> None:
        self.name = f"pdserve {linear}"
        self._round = 0
        # Repeats send the same prompts: they must be computed each time.
        config = EngineConfig(linear=linear, kv_memory_gib=0.5, prefix_cache=False)
        self._engine = assemble_engine(
            folder, config, max_model_len=None, num_threads=threads, clock=SystemClock()
        ).engine

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """See Contender.run."""
        self._round += 1
        self._engine.runner.bind_thread()
        outputs: dict[str, list[int]] = {}
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            outputs[str(number)] = []
            self._engine.scheduler.add(
                Request(
                    request_id=RequestId(str(number)),
                    attempt=self._round,
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                )
            )
        while self._engine.scheduler.has_work:
            for delta in self._engine.step():
                outputs[delta.request_id].extend(delta.token_ids)
        return list(outputs.values())


class TransformersContender:
    """transformers' continuous batching, attention sdpa, fp32."""

    name = "transformers CB fp32"

    def __init__(self, folder: Path, threads: int) -> None:
        self._threads = threads
        self._model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._generation = GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        """See Contender.run."""
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            results = self._model.generate_batch(inputs=prompts, generation_config=self._generation, progress_bar=False)
        ordered = sorted(results.values(), key=lambda result: int(str(result.request_id).rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for result in ordered]


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return `count` distinct prompts of PROMPT_TOKENS ids."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1000, min(vocab_size, 20000), (count, PROMPT_TOKENS), generator=generator)
    ids[:, 0] = 2
    rows: list[list[int]] = ids.tolist()
    return rows


def measure(contender: Contender, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return output tokens per second and the outputs."""
    start = time.perf_counter()
    outputs = contender.run(prompts)
    duration = time.perf_counter() - start
    for output in outputs:
        if len(output) != NEW_TOKENS:
            raise RuntimeError(f"{contender.name} returned {len(output)} tokens, not {NEW_TOKENS}")
    return sum(len(output) for output in outputs) / duration, outputs


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--linear", type=LinearKind, nargs="+", default=list(LinearKind))
    options = parser.parse_args(arguments)
    folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
    peer = TransformersContender(folder, options.threads)
    ours = [PdserveContender(folder, kind, options.threads) for kind in options.linear]
    contenders: list[Contender] = [peer, *ours]
    vocab_size = peer._model.config.vocab_size
    for contender in contenders:
        measure(contender, make_prompts(2, vocab_size))
    rates: dict[int, dict[str, list[float]]] = {}
    agreement: dict[int, dict[str, float]] = {}
    for batch in options.batch:
        prompts = make_prompts(batch, vocab_size)
        rates[batch] = {contender.name: [] for contender in contenders}
        for _ in range(options.repeats):
            outputs = {}
            for contender in contenders:
                rate, outputs[contender.name] = measure(contender, prompts)
                rates[batch][contender.name].append(rate)
        reference = outputs[peer.name]
        agreement[batch] = {
            name: sum(a == b for a, b in zip(found, reference, strict=True)) / batch for name, found in outputs.items()
        }
    report(contenders, rates, agreement, options.threads)
    return 0


def report(
    contenders: list[Contender],
    rates: dict[int, dict[str, list[float]]],
    agreement: dict[int, dict[str, float]],
    threads: int,
) -> None:
    """Print the table and the JSON line."""
    peer = contenders[0].name
    print(f"{'N':>4}  {'engine':22} {'tokens/s':>9}  {'spread':>15}  {'x peer':>6}  equal texts")
    rows = []
    for batch, by_name in rates.items():
        base = statistics.median(by_name[peer])
        for name, values in by_name.items():
            median = statistics.median(values)
            spread = f"{min(values):.1f}-{max(values):.1f}"
            ratio, equal = median / base, agreement[batch][name]
            print(f"{batch:>4}  {name:22} {median:>9.1f}  {spread:>15}  {ratio:>6.2f}  {equal:.0%}")
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
    print(json.dumps({"benchmark": "engine_throughput", "threads": threads, "rows": rows, **describe_environment()}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
