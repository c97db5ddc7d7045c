"""An open-loop load on an OpenAI-compatible server: requests start on a schedule fixed beforehand.

    python -m pdserve.benchmarks.http_load --url http://127.0.0.1:8000 --model NAME --rate 4 --duration 20

Latencies are taken from the intended start as well as from the actual send: a client or server that falls behind shows
in the first. Every request is counted by how it ended; latencies come from good ones only. Prints a table and a JSON
line; exits 1 if more than --max-error-rate of the requests failed.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp


@dataclass
class Outcome:
    """What happened to one request; times are seconds on the run's clock."""

    intended_time: float
    sent_time: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ending: str = "unfinished"

    @property
    def is_good(self) -> bool:
        """True if the answer ended as it should."""
        return self.ending in ("stop", "length")


async def run_one(session: aiohttp.ClientSession, options: argparse.Namespace, outcome: Outcome, origin: float) -> None:
    """Send one request at its time and record its stream."""
    await asyncio.sleep(max(0.0, origin + outcome.intended_time - time.perf_counter()))
    outcome.sent_time = time.perf_counter() - origin
    body = {
        "model": options.model,
        "prompt": [random.randrange(1000, 5000) for _ in range(options.prompt_tokens)],
        "max_tokens": options.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(f"{options.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                outcome.ending = f"http {answer.status}"
                return
            await read_stream(answer, outcome, origin)
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.ending = type(error).__name__


async def read_stream(answer: aiohttp.ClientResponse, outcome: Outcome, origin: float) -> None:
    """Record token times, usage and ending; a stream without [DONE] is cut."""
    reason, is_done = None, False
    async for line in answer.content:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                outcome.ending = "error event"
                return
            for choice in event["choices"]:
                if choice["text"]:
                    outcome.token_times.append(time.perf_counter() - origin)
                reason = choice["finish_reason"] or reason
            outcome.num_tokens = (event.get("usage") or {}).get("completion_tokens", outcome.num_tokens)
    outcome.ending = reason if is_done and reason else "cut stream"


def make_schedule(rate: float, duration_s: float, seed: int) -> list[Outcome]:
    """Return Poisson arrivals at `rate` per second over `duration_s`."""
    source, now, schedule = random.Random(seed), 0.0, []
    while (now := now + source.expovariate(rate)) < duration_s:
        schedule.append(Outcome(intended_time=now))
    return schedule


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Return p50, p95, p99 in milliseconds; None without values."""
    if not values:
        return {"p50": None, "p95": None, "p99": None}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {name: round(1000 * cuts[index], 1) for name, index in (("p50", 49), ("p95", 94), ("p99", 98))}


def summarise(outcomes: list[Outcome], duration_s: float) -> dict[str, object]:
    """Return the report of a run."""
    good = [outcome for outcome in outcomes if outcome.is_good and outcome.token_times]
    gaps = [b - a for outcome in good for a, b in zip(outcome.token_times, outcome.token_times[1:], strict=False)]
    return {
        "benchmark": "http_load",
        "requests": len(outcomes),
        "endings": dict(Counter(outcome.ending for outcome in outcomes)),
        "output_tokens_per_s": round(sum(outcome.num_tokens for outcome in outcomes) / duration_s, 1),
        "ttft_from_intended_ms": percentiles([outcome.token_times[0] - outcome.intended_time for outcome in good]),
        "ttft_from_sent_ms": percentiles([outcome.token_times[0] - outcome.sent_time for outcome in good]),
        "gap_ms": percentiles(gaps),
        "send_lag_ms": percentiles([outcome.sent_time - outcome.intended_time for outcome in outcomes]),
    }


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Run the load and return its report."""
    outcomes = make_schedule(options.rate, options.duration, options.seed)
    timeout = aiohttp.ClientTimeout(total=options.duration + options.grace)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        origin = time.perf_counter()
        await asyncio.gather(*(run_one(session, options, outcome, origin) for outcome in outcomes))
        elapsed_s = time.perf_counter() - origin
    return summarise(outcomes, elapsed_s)


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds to wait for the last answers")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-error-rate", type=float, default=0.01)
    options = parser.parse_args(arguments)
    report = asyncio.run(run(options))
    for key, value in report.items():
        print(f"{key:24} {value}")
    print(json.dumps(report))
    endings = report["endings"]
    assert isinstance(endings, dict)
    failed = sum(count for ending, count in endings.items() if ending not in ("stop", "length"))
    return int(failed > options.max_error_rate * sum(endings.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
