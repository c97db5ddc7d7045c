"""Paged attention in Triton: prefill and decode in one kernel, windows, soft caps, sinks, KV in any float dtype.

A program computes the states (query head of a token) of one work item that share a KV head, over tiles of TILE tokens
at absolute places, one after the other: no split by length or batch, so a token's result does not depend on either.
That makes it a backend of `engine.numerics: invariant`, and the one for what libraries do not cover. It runs on a CPU
in Triton's interpreter, where it is tested.
"""

import torch
import triton
import triton.language as tl

from pdserve.workers.attention.protocol import QUERY_TILE, AttentionParameters, StepMetadata

TILE = 32
"""Tokens of KV at a time."""
LEAST_STATES = 16
"""The smallest tile of a tensor core."""


@triton.jit  # type: ignore[untyped-decorator]  # it has no types
def _attend(  # type: ignore[no-untyped-def]  # Triton compiles it
    query,
    kv,
    table,
    positions,
    item_rows,
    item_starts,
    item_ends,
    sinks,
    out,
    query_stride,
    block_stride,
    side_stride,
    head_stride,
    token_stride,
    table_stride,
    window,
    scale,
    softcap,
    LANES: tl.constexpr,
    STATES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(item_rows + item)
    start = tl.load(item_starts + item)
    end = tl.load(item_ends + item)

    state = tl.arange(0, STATES)
    token = start + state // LANES
    head = kv_head * LANES + state % LANES
    is_state = token < end
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    at = token[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :]
    own = tl.load(query + at, mask=is_state[:, None] & is_dim[None, :], other=0.0)
    position = tl.load(positions + token, mask=is_state, other=0).to(tl.int32)

    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=is_state, other=0.0)
        total = tl.full([STATES], 1.0, tl.float32)
    else:
        peak = tl.full([STATES], -1e30, tl.float32)
        total = tl.zeros([STATES], tl.float32)
    sums = tl.zeros([STATES, PADDED_DIM], tl.float32)

    last = tl.load(positions + end - 1).to(tl.int32)
    first = tl.load(positions + start).to(tl.int32)
    first_seen = tl.where(window > 0, tl.maximum(first - window + 1, 0), 0)
    base = first_seen // TILE * TILE
    while base <= last:
        place = base + tl.arange(0, TILE)
        is_held = (place <= last) & (place >= first_seen)
        block = tl.load(table + row * table_stride + place // BLOCK_SIZE, mask=is_held, other=0).to(tl.int64)
        kept = block * block_stride + kv_head * head_stride + (place % BLOCK_SIZE) * token_stride
        is_loaded = is_held[:, None] & is_dim[None, :]
        keys = tl.load(kv + kept[:, None] + dim[None, :], mask=is_loaded, other=0.0).to(own.dtype)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_held[None, :] & (place[None, :] <= position[:, None])
        is_seen = is_seen & ((window <= 0) | (place[None, :] > position[:, None] - window))
        scores = tl.where(is_seen, scores, -1e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        decay = tl.exp(peak - new_peak)
        weights = tl.where(is_seen, tl.exp(scores - new_peak[:, None]), 0.0)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(kv + kept[:, None] + side_stride + dim[None, :], mask=is_loaded, other=0.0).to(own.dtype)
        sums = sums * decay[:, None] + tl.dot(weights.to(own.dtype), values, input_precision="ieee")
        peak = new_peak
        base += TILE
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_state[:, None] & is_dim[None, :])


class TritonAttention:
    """The backend. Queries are multiplied in their own dtype, sums are fp32."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """See AttentionBackend.attend; kv in a float dtype."""
        tensors = step.tensors(query.device)
        place = tensors.groups[parameters.group]
        query = query.contiguous()
        out = torch.empty_like(query)
        num_heads, head_dim = query.shape[1:]
        lanes = num_heads // kv.shape[2]
        has_sinks = parameters.sinks is not None
        _attend[(len(tensors.item_rows), kv.shape[2])](
            query,
            kv,
            place.block_table,
            tensors.positions,
            tensors.item_rows,
            tensors.item_starts,
            tensors.item_ends,
            parameters.sinks if has_sinks else query,
            out,
            query.stride(0),
            *kv.stride()[:4],
            place.block_table.stride(0),
            place.window,
            parameters.scale,
            parameters.softcap,
            LANES=lanes,
            STATES=max(LEAST_STATES, triton.next_power_of_2(QUERY_TILE * lanes)),
            HEAD_DIM=head_dim,
            PADDED_DIM=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_SIZE=kv.shape[3],
            TILE=TILE,
            HAS_SINKS=has_sinks,
            HAS_SOFTCAP=parameters.softcap != 0.0,
        )
        return out.view(query.shape[0], -1)
