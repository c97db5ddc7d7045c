"""Paged attention on CPU, reading blocks in place, with bits that depend on a token's own history only.

The rules that make it exact: KV is visited in absolute tiles of 32 tokens, whatever the block size and where a window
starts; one inner loop serves prefill and decode; tiling is over queries only; sums over tokens run in token order and
are never split by batch. The dot product over the head dimension may be vectorised: it is one piece of code with one
trip count, so every (query, key) pair meets the same order of additions. int8 KV is read in place too: a key's scale
multiplies its score, a value's scale its weight.
"""

import numba
import numpy as np
import torch

from pdserve.workers.attention.protocol import StepMetadata
from pdserve.workers.kv.int8_rows import row_scales
from pdserve.workers.model.scalar_math import exp32

TILE = 32
RUN = 16
"""Tokens that surely share a block: block sizes are multiples of 16."""


@numba.njit(nogil=True, fastmath={"contract", "nsz", "reassoc"})
def _dot(query, token, head, kv, block, kv_head, offset):  # type: ignore[no-untyped-def]  # numba infers the types
    total = np.float32(0.0)
    for d in range(query.shape[2]):
        total += query[token, head, d] * kv[block, 0, kv_head, offset, d]
    return total


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def _attend(query, kv, scales, table, positions, item_rows, item_starts, item_ends, window, scale, out):  # type: ignore[no-untyped-def]  # numba infers the types
    # kv [N, 2, Hkv, B, row]; scales [N, 2, Hkv, B] of an int8 kv, None otherwise: numba compiles one kernel for each.
    num_kv_heads, block_size, size = kv.shape[2], kv.shape[3], query.shape[2]
    heads_per_kv = query.shape[1] // num_kv_heads
    for work in numba.prange(item_rows.shape[0] * num_kv_heads):
        item = work // num_kv_heads
        kv_head = work - item * num_kv_heads
        row, start, end = item_rows[item], item_starts[item], item_ends[item]
        num_states = (end - start) * heads_per_kv
        sums = np.zeros((num_states, size), np.float32)
        largest = np.full(num_states, np.float32(-1e30), np.float32)
        weight_sums = np.zeros(num_states, np.float32)
        weights = np.empty(TILE, np.float32)
        first_visible = max(0, positions[start] - window + 1) if window > 0 else 0
        for tile in range(first_visible // TILE, positions[end - 1] // TILE + 1):
            base = tile * TILE
            for token in range(start, end):
                position = positions[token]
                low = max(base, position - window + 1) if window > 0 else base
                high = min(base + TILE, position + 1)
                if low >= high:
                    continue
                for lane in range(heads_per_kv):
                    head = kv_head * heads_per_kv + lane
                    state = (token - start) * heads_per_kv + lane
                    peak = largest[state]
                    for run in range(base, base + TILE, RUN):
                        run_low, run_high = max(low, run), min(high, run + RUN)
                        if run_low < run_high:
                            block = table[row, run // block_size]
                            shift = run // block_size * block_size
                            for key in range(run_low, run_high):
                                score = _dot(query, token, head, kv, block, kv_head, key - shift) * scale
                                if scales is not None:
                                    score *= scales[block, 0, kv_head, key - shift]
                                weights[key - base] = score
                                peak = max(peak, score)
                    decay = exp32(largest[state] - peak)
                    largest[state] = peak
                    for key in range(low - base, high - base):
                        weights[key] = exp32(weights[key] - peak)
                    total = weight_sums[state] * decay
                    for key in range(low - base, high - base):
                        total += weights[key]
                    weight_sums[state] = total
                    for d in range(size):
                        sums[state, d] *= decay
                    for run in range(base, base + TILE, RUN):
                        run_low, run_high = max(low, run), min(high, run + RUN)
                        if run_low < run_high:
                            block = table[row, run // block_size]
                            shift = run // block_size * block_size
                            for key in range(run_low, run_high):
                                weight = weights[key - base]
                                if scales is not None:
                                    weight *= scales[block, 1, kv_head, key - shift]
                                for d in range(size):
                                    sums[state, d] += weight * kv[block, 1, kv_head, key - shift, d]
        for token in range(start, end):
            for lane in range(heads_per_kv):
                state = (token - start) * heads_per_kv + lane
                head = kv_head * heads_per_kv + lane
                inverse = np.float32(1.0) / weight_sums[state]
                for d in range(size):
                    out[token, head, d] = sums[state, d] * inverse


class NumbaAttention:
    """The CPU backend. The number of threads is numba's (set by the engine thread)."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, group: int, scale: float
    ) -> torch.Tensor:
        """See AttentionBackend.attend; the query is fp32."""
        out = torch.empty_like(query)
        place = step.groups[group]
        _attend(
            query.numpy(),
            kv.numpy(),
            row_scales(kv, query.shape[2]).numpy() if kv.dtype == torch.int8 else None,
            place.block_table,
            step.positions,
            step.item_rows,
            step.item_starts,
            step.item_ends,
            place.window,
            np.float32(scale),
            out.numpy(),
        )
        return out.view(query.shape[0], -1)
