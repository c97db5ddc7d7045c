"""What taking a token costs for each kind of sampling, against the usual way in torch.

    python -m pdserve.benchmarks.sampler [--vocab 262144] [--rows 1 8 32] [--threads 2]

Rows of logits with a language model's shape: a few likely tokens over a normal background. The peer does what Hugging
Face's warpers do: temperature, top-k by `topk`, top-p by a sort of the row, softmax, `multinomial`. Both run in turn
(A B A B ...); prints microseconds a row, median and spread, and one JSON line.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import torch

from pdserve.benchmarks.environment import describe_environment
from pdserve.workers.engine.logprobs import logprobs_of
from pdserve.workers.engine.plan import Float32, SamplingArrays
from pdserve.workers.engine.sampler import sample_rows

REPEATS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Sampling parameters to measure."""

    name: str
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    spread: float = 2.0
    """Standard deviation of the background; a small one makes a flat row."""


KINDS = (
    Kind(name="temperature"),
    Kind(name="top_k 50", top_k=50),
    Kind(name="top_p 0.95", top_p=0.95),
    Kind(name="top_k 50, top_p 0.95", top_k=50, top_p=0.95),
    Kind(name="min_p 0.05", min_p=0.05),
    Kind(name="flat row, top_p 0.95", top_p=0.95, spread=0.5),
)


def make_logits(num_rows: int, vocab_size: int, spread: float) -> Float32:
    """Return rows of logits [num_rows, vocab_size]."""
    generator = np.random.default_rng(0)
    logits = generator.normal(scale=spread, size=(num_rows, vocab_size)).astype(np.float32)
    if spread > 1.0:
        for row in logits:
            row[generator.integers(0, vocab_size, 40)] += np.linspace(6, 16, 40, dtype=np.float32)
    return logits


def make_sampling(num_rows: int, kind: Kind) -> SamplingArrays:
    """Return the parameters of rows of one kind."""
    return SamplingArrays(
        temperature=np.full(num_rows, 0.8),
        top_k=np.full(num_rows, kind.top_k, np.int32),
        top_p=np.full(num_rows, kind.top_p),
        min_p=np.full(num_rows, kind.min_p),
        seed=np.arange(num_rows, dtype=np.uint64),
        sample=np.zeros(num_rows, np.uint64),
        position=np.zeros(num_rows, np.int64),
        num_logprobs=np.full(num_rows, -1, np.int32),
    )


def sample_by_sorting(logits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Draw one token per row [N, V] as the usual warpers do."""
    scores = logits / 0.8
    if kind.top_k:
        border = torch.topk(scores, kind.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < border, -torch.inf)
    if kind.top_p < 1.0:
        values, order = torch.sort(scores, descending=False)
        is_dropped = values.softmax(-1).cumsum(-1) <= 1 - kind.top_p
        is_dropped[:, -1:] = False
        scores = scores.masked_fill(is_dropped.scatter(1, order, is_dropped), -torch.inf)
    probabilities = scores.softmax(-1)
    if kind.min_p:
        is_dropped = probabilities < kind.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = scores.masked_fill(is_dropped, -torch.inf).softmax(-1)
    return torch.multinomial(probabilities, 1)


def seconds_of(run: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start_time = time.perf_counter()
    run()
    return time.perf_counter() - start_time


def compare(ours: Callable[[], object], theirs: Callable[[], object], num_rows: int) -> dict[str, float]:
    """Run both in turn; return microseconds a row."""
    ours(), theirs()
    times = np.array([(seconds_of(ours), seconds_of(theirs)) for _ in range(REPEATS)]) * 1e6 / num_rows
    low, middle, high = np.percentile(times[:, 0], (10, 50, 90))
    return {"us": middle, "us_p10": low, "us_p90": high, "peer_us": float(np.median(times[:, 1]))}


def main() -> None:
    """Measure every kind at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    numba.config.THREADING_LAYER = "omp"
    numba.set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    found: list[dict[str, object]] = []
    print(f"{'kind':24} rows   µs a row (p10-p90)     peer   ratio")

    def report(name: str, num_rows: int, measured: dict[str, float]) -> None:
        found.append({"kind": name, "rows": num_rows, **{key: round(value, 1) for key, value in measured.items()}})
        spread = f"{measured['us_p10']:.0f}-{measured['us_p90']:.0f}"
        ratio = measured["peer_us"] / measured["us"]
        print(f"{name:24} {num_rows:4} {measured['us']:8.0f} ({spread:11}) {measured['peer_us']:9.0f} {ratio:6.1f}x")

    for num_rows in arguments.rows:
        for kind in KINDS:
            logits = make_logits(num_rows, arguments.vocab, kind.spread)
            sampling, rows, tensor = make_sampling(num_rows, kind), np.arange(num_rows), torch.from_numpy(logits)
            measured = compare(
                lambda logits=logits, sampling=sampling, rows=rows: sample_rows(logits, sampling, rows),  # type: ignore[misc]
                lambda tensor=tensor, kind=kind: sample_by_sorting(tensor, kind),  # type: ignore[misc]
                num_rows,
            )
            report(kind.name, num_rows, measured)
        logits = make_logits(num_rows, arguments.vocab, 2.0)
        tensor = torch.from_numpy(logits)
        measured = compare(
            lambda logits=logits: [logprobs_of(row, 5, 5) for row in logits],  # type: ignore[misc]
            lambda tensor=tensor: torch.topk(tensor.log_softmax(-1), 5),  # type: ignore[misc]
            num_rows,
        )
        report("log probabilities, top 5", num_rows, measured)
    print(json.dumps({"benchmark": "sampler", "vocab": arguments.vocab, "found": found, **describe_environment()}))


if __name__ == "__main__":
    main()
