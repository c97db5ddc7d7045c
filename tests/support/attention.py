"""Attention cases, and what attention is."""

import numpy as np
import torch

from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata, build_metadata
from pdserve.workers.engine.plan import Int32, SamplingArrays, StepPlan

EMPTY = SamplingArrays(
    temperature=np.zeros(0),
    top_k=np.zeros(0, np.int32),
    top_p=np.zeros(0),
    min_p=np.zeros(0),
    seed=np.zeros(0, np.uint64),
    sample=np.zeros(0, np.uint64),
    position=np.zeros(0, np.int64),
    num_logprobs=np.zeros(0, np.int32),
)


def make_plan(rows: list[tuple[int, int]], table: Int32) -> StepPlan:
    """Return a plan of rows (first position, tokens) over one block table row each."""
    positions = np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in rows])
    starts = np.cumsum([0] + [count for _, count in rows]).astype(np.int32)
    return StepPlan(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        row_starts=starts,
        block_tables=(table,),
        sample_rows=np.zeros(0, np.int32),
        sampling=EMPTY,
    )


def make_case(
    rows: list[tuple[int, int]], *, block_size: int, heads: int, kv_heads: int, size: int, window: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    generator = torch.Generator().manual_seed(seed)
    blocks_each = -(-max(first + count for first, count in rows) // block_size)
    order = torch.randperm(len(rows) * blocks_each, generator=generator).numpy().astype(np.int32)
    plan = make_plan(rows, order.reshape(len(rows), blocks_each))
    query = torch.randn(plan.num_tokens, heads, size, generator=generator)
    kv = torch.randn(len(order), 2, kv_heads, block_size, size, generator=generator)
    return query, kv, build_metadata(plan, (window,), block_size)


def definition(
    query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
) -> torch.Tensor:
    """Attention token by token in fp64."""
    place = step.groups[0]
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // kv.shape[2]
    for row in range(len(step.row_starts) - 1):
        for token in range(step.row_starts[row], step.row_starts[row + 1]):
            last = int(step.positions[token])
            first = max(0, last - place.window + 1) if place.window else 0
            places = np.arange(first, last + 1)
            blocks, offsets = place.block_table[row, places // kv.shape[3]], places % kv.shape[3]
            for head in range(query.shape[1]):
                keys = kv[blocks, 0, head // group, offsets].double()
                values = kv[blocks, 1, head // group, offsets].double()
                scores = keys @ query[token, head].double() * parameters.scale
                if parameters.softcap:
                    scores = parameters.softcap * torch.tanh(scores / parameters.softcap)
                if parameters.sinks is not None:
                    scores = torch.cat([scores, parameters.sinks[head : head + 1].double()])
                out[token, head] = torch.softmax(scores, 0)[: len(values)] @ values
    return out.view(query.shape[0], -1)
