"""Paged attention on CPU, reading blocks in place, with bits that depend on a token's own history only.

A *state* is one query head of one token. The states of a work item that share a KV head are computed together over each
tile of KV: scores four states by two keys at a time (one by one where fewer than three heads share a KV head), weighted
values two states by four keys, so that what is loaded is used several times.

The rules that make it exact: KV is visited in absolute tiles of 32 tokens, whatever the block size and where a window
starts; one piece of code serves prefill and decode (missing states are zeros); each state adds the values of its keys
in token order and is never split by batch. The dot product over the head dimension is vectorised: every (query, key)
pair of a model goes through the same loop with the same trip count, so it meets the same order of additions.

int8 and fp16 KV becomes fp32, 16 tokens at a time, in a buffer of the work item; so does what many states read, to stay
in the first-level cache.
"""

import numba
import numpy as np
import torch

from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata
from pdserve.workers.kv.row_kernels import decode_halves
from pdserve.workers.kv.rows import row_scales
from pdserve.workers.model.scalar_math import exp32
from pdserve.workers.model.softcap import capped

TILE = 32
NO_SINKS = np.empty(0, np.float32)
RUN = 16
"""Tokens that surely share a block: block sizes are multiples of 16."""
FEW_STATES = 8
"""So few states, a decode's, read fp32 KV where it lies."""
FEW_LANES = 2
"""Up to so many query heads of a KV head, states are scored one by one: a decode has no four to score together."""


@numba.njit(nogil=True, fastmath={"contract", "nsz", "reassoc"})
def _score_one(query, state, keys, key):  # type: ignore[no-untyped-def]  # numba infers the types
    # query[state] · keys[key]
    total = np.float32(0.0)
    for d in range(query.shape[1]):
        total += query[state, d] * keys[key, d]
    return total


@numba.njit(nogil=True, fastmath={"contract", "nsz", "reassoc"})
def _score_four(query, state, keys, key, scores, column):  # type: ignore[no-untyped-def]  # numba infers the types
    # scores[state : state + 4, column : column + 2] = query · keys[key : key + 2]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
    for d in range(query.shape[1]):
        a, b = keys[key, d], keys[key + 1, d]
        q0, q1, q2, q3 = query[state, d], query[state + 1, d], query[state + 2, d], query[state + 3, d]
        a0 += q0 * a
        a1 += q1 * a
        a2 += q2 * a
        a3 += q3 * a
        b0 += q0 * b
        b1 += q1 * b
        b2 += q2 * b
        b3 += q3 * b
    scores[state, column], scores[state, column + 1] = a0, b0
    scores[state + 1, column], scores[state + 1, column + 1] = a1, b1
    scores[state + 2, column], scores[state + 2, column + 1] = a2, b2
    scores[state + 3, column], scores[state + 3, column + 1] = a3, b3


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _add_to_two(sums, state, weights, column, values, key):  # type: ignore[no-untyped-def]  # numba infers the types
    # sums[state : state + 2] += weights[:, column : column + 4] · values[key : key + 4], key by key.
    w0, w1, w2, w3 = weights[state, column : column + 4]
    u0, u1, u2, u3 = weights[state + 1, column : column + 4]
    for d in range(sums.shape[1]):
        v0, v1, v2, v3 = values[key, d], values[key + 1, d], values[key + 2, d], values[key + 3, d]
        sums[state, d] = (((sums[state, d] + w0 * v0) + w1 * v1) + w2 * v2) + w3 * v3
        sums[state + 1, d] = (((sums[state + 1, d] + u0 * v0) + u1 * v1) + u2 * v2) + u3 * v3


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _add_key(sums, state, weights, column, values, key):  # type: ignore[no-untyped-def]  # numba infers the types
    # The same for one state and one key.
    w = weights[state, column]
    for d in range(sums.shape[1]):
        sums[state, d] += w * values[key, d]


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _add_values(sums, weights, lows, highs, column, values, key, count):  # type: ignore[no-untyped-def]  # numba infers the types
    # For each state: sums [S, D] += weights[:, column : column + count] · values[key : key + count], key by key, of the
    # columns lows ... highs - 1 that it sees. What a state does not see is not multiplied by 0: it may be inf or NaN.
    for place in range(0, count, 4):
        first = column + place
        end = min(first + 4, column + count)
        state = 0
        while state < sums.shape[0]:
            if (
                state + 1 < sums.shape[0]
                and end - first == 4
                and max(lows[state], lows[state + 1]) <= first
                and end <= min(highs[state], highs[state + 1])
            ):
                _add_to_two(sums, state, weights, first, values, key + place)
                state += 2
            else:
                for seen in range(max(first, lows[state]), min(end, highs[state])):
                    _add_key(sums, state, weights, seen, values, key + seen - column)
                state += 1


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _weigh(scores, low, high, scale, softcap, largest, weight_sums, sums, state):  # type: ignore[no-untyped-def]  # numba infers the types
    # Online softmax: turns the scores that a state sees of a tile into weights, and rescales its sums.
    row = scores[state]
    peak = largest[state]
    for column in range(low, high):
        row[column] *= scale
    if softcap > 0:
        for column in range(low, high):
            row[column] = capped(row[column], softcap)
    for column in range(low, high):
        peak = max(peak, row[column])
    decay = exp32(largest[state] - peak)
    largest[state] = peak
    total = weight_sums[state] * decay
    for column in range(low, high):
        row[column] = exp32(row[column] - peak)
    for column in range(low, high):
        total += row[column]
    weight_sums[state] = total
    for d in range(sums.shape[1]):
        sums[state, d] *= decay


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _load(held, scales, is_half, low, high, bits, rows):  # type: ignore[no-untyped-def]  # numba infers the types
    # rows[low % RUN : ...] = the keys or values at the offsets low ... high - 1 of a block, as fp32; bits is a view.
    for offset in range(low, high):
        place = offset % RUN
        if is_half:
            decode_halves(held[offset], bits[place], rows[place])
        elif scales is None:
            for d in range(rows.shape[1]):
                rows[place, d] = held[offset, d]
        else:
            for d in range(rows.shape[1]):
                rows[place, d] = np.float32(held[offset, d]) * scales[offset]


@numba.njit(nogil=True, fastmath={"contract", "nsz"})
def _add_scores(own, keys, key, count, has_few_lanes, scores, column):  # type: ignore[no-untyped-def]  # numba infers the types
    # scores[:, column : column + count] = own · keys[key : key + count]. Pairs begin at even rows; what is no key of
    # this range may hold anything, its score is not used.
    if has_few_lanes:
        for state in range(own.shape[0]):
            for place in range(count):
                scores[state, column + place] = _score_one(own, state, keys, key + place)
    else:
        for state in range(0, own.shape[0], 4):
            for place in range(-(key % 2), count, 2):
                _score_four(own, state, keys, key + place, scores, column + place)


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def _attend(  # type: ignore[no-untyped-def]  # numba infers the types
    query,
    kv,
    scales,
    is_half,
    table,
    positions,
    item_rows,
    item_starts,
    item_ends,
    window,
    scale,
    softcap,
    sinks,
    out,
):
    # kv [N, 2, Hkv, B, row], fp16 as its bits; scales [N, 2, Hkv, B] of an int8 kv, None otherwise: numba compiles one
    # kernel for each. sinks [Hq], or empty.
    num_kv_heads, block_size, size = kv.shape[2], kv.shape[3], query.shape[2]
    lanes = query.shape[1] // num_kv_heads
    has_few_lanes = lanes <= FEW_LANES
    for work in numba.prange(item_rows.shape[0] * num_kv_heads):
        item = work // num_kv_heads
        kv_head = work - item * num_kv_heads
        row, start, end = item_rows[item], item_starts[item], item_ends[item]
        num_states = (end - start) * lanes
        padded = num_states if has_few_lanes else (num_states + 3) // 4 * 4
        own = np.zeros((padded, size), np.float32)
        for state in range(num_states):
            own[state] = query[start + state // lanes, kv_head * lanes + state % lanes]
        sums = np.zeros((padded, size), np.float32)
        largest = np.full(padded, np.float32(-1e30), np.float32)
        weight_sums = np.zeros(padded, np.float32)
        if len(sinks):
            # A key that was seen before all others, and has no value.
            for state in range(num_states):
                largest[state] = sinks[kv_head * lanes + state % lanes]
                weight_sums[state] = np.float32(1.0)
        scores = np.zeros((padded, TILE), np.float32)
        lows, highs = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        bits = np.zeros((RUN, size), np.uint32)
        rows = bits.view(np.float32)
        is_buffered = scales is not None or is_half or padded > FEW_STATES
        # What no state of the item sees may never have been written: it is not read.
        first_seen = max(0, positions[start] - window + 1) if window > 0 else 0
        end_seen = positions[end - 1] + 1
        for tile in range(first_seen // TILE, (end_seen - 1) // TILE + 1):
            base = tile * TILE
            for run in range(base, base + TILE, RUN):
                low, high = max(run, first_seen), min(run + RUN, end_seen)
                if low < high:
                    block, offset = table[row, run // block_size], run % block_size
                    keys = kv[block, 0, kv_head]
                    if is_buffered:
                        key_scales = None if scales is None else scales[block, 0, kv_head]
                        _load(keys, key_scales, is_half, low - run + offset, high - run + offset, bits, rows)
                        _add_scores(own, rows, low - run, high - low, has_few_lanes, scores, low - base)
                    else:
                        _add_scores(own, keys, low - run + offset, high - low, has_few_lanes, scores, low - base)
            for state in range(num_states):
                position = positions[start + state // lanes]
                lows[state] = max(base, position - window + 1) - base if window > 0 else 0
                highs[state] = max(lows[state], min(base + TILE, position + 1) - base)
                _weigh(scores, lows[state], highs[state], scale, softcap, largest, weight_sums, sums, state)
            # Missing states keep the last one company, so that it is not added key by key.
            lows[num_states:], highs[num_states:] = lows[num_states - 1], highs[num_states - 1]
            for run in range(base, base + TILE, RUN):
                low, high = max(run, first_seen), min(run + RUN, end_seen)
                if low < high:
                    block, offset = table[row, run // block_size], run % block_size
                    values = kv[block, 1, kv_head]
                    if is_buffered:
                        value_scales = None if scales is None else scales[block, 1, kv_head]
                        _load(values, value_scales, is_half, low - run + offset, high - run + offset, bits, rows)
                        _add_values(sums, scores, lows, highs, low - base, rows, low - run, high - low)
                    else:
                        _add_values(sums, scores, lows, highs, low - base, values, low - run + offset, high - low)
        for state in range(num_states):
            inverse = np.float32(1.0) / weight_sums[state]
            target = out[start + state // lanes, kv_head * lanes + state % lanes]
            for d in range(size):
                target[d] = sums[state, d] * inverse


class NumbaAttention:
    """The CPU backend. The number of threads is numba's (set by the engine thread)."""

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, step: StepMetadata, parameters: AttentionParameters
    ) -> torch.Tensor:
        """See AttentionBackend.attend; the query is fp32."""
        out = torch.empty_like(query)
        place = step.groups[parameters.group]
        is_half = kv.dtype == torch.float16
        _attend(
            query.numpy(),
            kv.view(torch.uint16).numpy() if is_half else kv.numpy(),
            row_scales(kv, query.shape[2]).numpy() if kv.dtype == torch.int8 else None,
            is_half,
            place.block_table,
            step.positions,
            step.item_rows,
            step.item_starts,
            step.item_ends,
            place.window,
            np.float32(parameters.scale),
            np.float32(parameters.softcap),
            NO_SINKS if parameters.sinks is None else parameters.sinks.numpy(),
            out.numpy(),
        )
        return out.view(query.shape[0], -1)
