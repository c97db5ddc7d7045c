"""Speed of the KV hand-off: bytes per second and added latency, by transport, chunk size, concurrency and sources.

    python -m pdserve.benchmarks.handoff [--experiments transports layers concurrency sources checksum] [--repeats 3]

Prefill and decode workers in processes of their own, one core a side, with the KV layout of Gemma-3-270M without
windows (36 KiB a token). Their engines compute nothing, so the transfer is all there is. In the same run, on the same
cores, a yardstick for each transport: the *two-copy limit* (plain copies of 3 MiB from one process's memory into shared
slots, and on into the other's), a *raw socket*, *raw NIXL* and *raw Gloo* (the same bytes, nothing gathered, verified
or scattered). Rounds take turns.

Rate: twelve prompts of 4096 tokens in steps of 2048, four at a time, bytes over the time from the first request to the
last COMMIT. Added latency: one prompt of one block, from the last layer's KV at the source to the first decode step at
the sink. With --model, a real model prefills prompts of 2048 tokens in chunks of 512, and the share of bytes that the
sink had credited before prefill ended is shown.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pdserve.benchmarks.environment import describe_environment
from pdserve.benchmarks.handoff_workers import Case, measure_overlap, measure_transfer
from pdserve.benchmarks.yardsticks import checksum_cost, raw_gloo, raw_nixl, raw_socket, two_copy_limit
from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.environment import cache_dir
from pdserve.workers.model.source import prepare_model

YARDSTICKS: dict[TransportKind, tuple[str, Callable[[], float]]] = {
    TransportKind.SHM: ("two-copy limit", two_copy_limit),
    TransportKind.NIXL: ("raw NIXL", raw_nixl),
    TransportKind.TCP: ("raw loopback socket", raw_socket),
    TransportKind.TORCH_DIST: ("raw Gloo", raw_gloo),
}
EXPERIMENTS = ("transports", "layers", "concurrency", "sources", "checksum")


def cases_of(experiment: str, transports: Sequence[TransportKind], slot_mib: Sequence[float]) -> list[tuple[str, Case]]:
    """Return what an experiment measures, each with its name in the table."""
    if experiment == "transports":
        return [
            (f"slots of {size:g} MiB", Case(transport=kind, slot_bytes=int(size * (1 << 20))))
            for size in slot_mib
            for kind in transports
        ]
    plain = Case(transport=transports[0])
    if experiment == "layers":
        return [(f"{count} layers a chunk", replace(plain, layers_per_chunk=count)) for count in (1, 3, 6, 18)]
    if experiment == "concurrency":
        return [(f"{count} at a time", replace(plain, num_clients=count)) for count in (1, 2, 4, 8)]
    return [(f"{count} prefill workers", replace(plain, num_sources=count)) for count in (1, 2)]


class Table:
    """Rates and latencies of cases, in turns, beside their yardsticks."""

    def __init__(self) -> None:
        self.limits: dict[TransportKind, list[float]] = {}
        self.rates: dict[tuple[str, Case], list[float]] = {}
        self.latencies: dict[tuple[str, Case], list[float]] = {}

    def measure(self, cases: Sequence[tuple[str, Case]], repeats: int) -> None:
        """Measure each case, and the yardstick of each of its transports, once a round."""
        for _ in range(repeats):
            for kind in dict.fromkeys(case.transport for _, case in cases):
                self.limits.setdefault(kind, []).append(YARDSTICKS[kind][1]())
            for key in cases:
                rate, latencies = asyncio.run(measure_transfer(key[1]))
                self.rates.setdefault(key, []).append(rate)
                self.latencies.setdefault(key, []).extend(latencies)

    def print(self) -> list[dict[str, object]]:
        """Show the table; return its rows."""
        for kind, found in self.limits.items():
            name = YARDSTICKS[kind][0]
            print(f"{name:<22}{statistics.median(found):6.2f} GiB/s  ({min(found):.2f}-{max(found):.2f})")
        print(f"{'transport':<12}{'case':<20}{'GiB/s':>8}{'spread':>14}{'of limit':>10}{'added ms p50':>14}{'p95':>7}")
        rows: list[dict[str, object]] = []
        for (label, case), found in self.rates.items():
            rate, added = statistics.median(found), 1000 * np.percentile(self.latencies[label, case], [50, 95])
            share = rate / statistics.median(self.limits[case.transport])
            rows.append(
                {
                    "transport": case.transport,
                    "case": label,
                    "gib_per_s": round(rate, 3),
                    "spread": [round(min(found), 3), round(max(found), 3)],
                    "share_of_limit": round(share, 3),
                    "added_ms_p50": round(float(added[0]), 2),
                    "added_ms_p95": round(float(added[1]), 2),
                }
            )
            print(
                f"{case.transport:<12}{label:<20}{rate:>8.2f}{f'{min(found):.2f}-{max(found):.2f}':>14}"
                f"{share:>10.0%}{added[0]:>14.2f}{added[1]:>7.2f}"
            )
        return rows


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=["transports"])
    parser.add_argument(
        "--transports",
        nargs="+",
        type=TransportKind,
        choices=list(TransportKind),
        default=list(TransportKind),
        help="the first one is that of the other experiments",
    )
    parser.add_argument("--slot-mib", type=float, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="measure the overlap with this model too, for example `demo`")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"benchmark": "handoff"}
    for experiment in options.experiments:
        print(f"# {experiment}")
        if experiment == "checksum":
            rates = [checksum_cost() for _ in range(options.repeats)]
            found = {name: [round(rate[name], 2) for rate in rates] for name in rates[0]}
            for name, values in found.items():
                print(f"{name:<24}{statistics.median(values):6.2f} GiB/s  ({min(values):.2f}-{max(values):.2f})")
            result[experiment] = found
            continue
        table = Table()
        table.measure(cases_of(experiment, options.transports, options.slot_mib), options.repeats)
        result[experiment] = {"rows": table.print(), "limits_gib_per_s": table.limits}
    if options.model:
        folder = prepare_model(options.model, cache_dir(), lambda stage, share: None)
        for kind in options.transports:
            share, num_prompts = asyncio.run(measure_overlap(folder, kind))
            result[f"overlap {kind}"] = round(share, 4)
            print(f"{kind}: {share:.1%} of the bytes of {num_prompts} prompts credited before prefill ended")
    print(json.dumps({**result, **describe_environment()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
