"""Prefix hits of a trace by the size of the cache, in the block pool that workers use.

    python -m pdserve.benchmarks.hit_rates TRACE.jsonl[.gz] [--blocks 1000 3000 10000 30000 100000 0] [--plot FILE.svg]

The trace is in Mooncake's format, one JSON object a line with `input_length` and `hash_ids`, the chain of its prompt's
512-token blocks (kvcache-ai/Mooncake, FAST25-release/traces). Each request acquires its cached prefix, allocates the
rest, publishes it and leaves, in the order of the trace; 0 blocks means a pool that never evicts. Prints two shares of
prompt tokens that were cached: by the trace's blocks, the last one partial, as published curves count; and as workers
do, who share whole blocks only and always compute the last token. And one JSON line.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.benchmarks.environment import describe_environment
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.prefix_cache import FirstBlocks

BLOCK_TOKENS = 512
LAYOUT = KVLayout(
    model_digest="trace",
    kv_dtype=KVDtype.FLOAT32,
    block_size=BLOCK_TOKENS,
    num_kv_heads=1,
    head_dim=2,
    groups=(GroupLayout(window=0, layers=(0,)),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPrompt:
    """One prompt of a trace; the last block of its chain may be partial."""

    num_tokens: int
    chain: tuple[bytes, ...]


def read_prompts(path: Path) -> Iterator[TracedPrompt]:
    """Read a trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            chain = tuple(int(number).to_bytes(16, "little") for number in entry["hash_ids"])
            yield TracedPrompt(num_tokens=entry["input_length"], chain=chain)


def measure_hits(prompts: list[TracedPrompt], num_blocks: int, *, whole_only: bool) -> float:
    """Run prompts through a pool; return the share of tokens that were cached.

    With `whole_only` partial blocks are not shared, and the last token is not taken over. A prompt that the pool cannot
    hold hits nothing.
    """
    pool, firsts = BlockPool([num_blocks]), FirstBlocks(LAYOUT)
    num_tokens = num_hit = 0
    for prompt in prompts:
        num_tokens += prompt.num_tokens
        if len(prompt.chain) > num_blocks:
            continue
        taken, published = len(prompt.chain), len(prompt.chain)
        if whole_only:
            taken, published = (prompt.num_tokens - 1) // BLOCK_TOKENS, prompt.num_tokens // BLOCK_TOKENS
        (held,) = pool.acquire_prefix(prompt.chain[:taken], firsts)
        num_hit += min(len(held) * BLOCK_TOKENS, prompt.num_tokens)
        new = pool.allocate([len(prompt.chain) - len(held)])
        assert new is not None, "nothing else holds blocks"
        for name, block in zip(prompt.chain[len(held) : published], new[0], strict=False):
            pool.publish(0, block, name)
        pool.release(0, [*held, *new[0]])
    assert pool.is_all_free
    return num_hit / num_tokens


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 3000, 10000, 30000, 100000, 0])
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    prompts = list(read_prompts(arguments.trace))
    num_unique = len({name for prompt in prompts for name in prompt.chain})
    print(f"{len(prompts)} prompts, {sum(prompt.num_tokens for prompt in prompts)} tokens, {num_unique} unique blocks")
    print(f"{'blocks':>8}  {'by blocks of the trace':>22}  {'as workers share':>16}")
    found = []
    for count in arguments.blocks:
        blocks = count or num_unique
        by_trace, by_worker = (measure_hits(prompts, blocks, whole_only=whole) for whole in (False, True))
        found.append({"blocks": blocks, "by_trace": round(by_trace, 4), "by_worker": round(by_worker, 4)})
        print(f"{blocks:8}  {by_trace:22.1%}  {by_worker:16.1%}", flush=True)
    if arguments.plot:
        from pdserve.benchmarks.plots import save_line_chart

        sizes = sorted(found, key=lambda row: row["blocks"])
        blocks_of = [row["blocks"] for row in sizes]
        save_line_chart(
            arguments.plot,
            {
                "by blocks of the trace": (blocks_of, [row["by_trace"] for row in sizes]),
                "as workers share": (blocks_of, [row["by_worker"] for row in sizes]),
            },
            title="Prefix hits by cache size",
            x_label=f"blocks of {BLOCK_TOKENS} tokens",
            y_label="share of prompt tokens",
            has_log_x=True,
        )
    print(
        json.dumps({"benchmark": "hit_rates", "trace": arguments.trace.name, "found": found, **describe_environment()})
    )


if __name__ == "__main__":
    main()
