"""CPU kernels of mixtures of experts. Each row is computed alone: its bits are its own."""

import numba
import numpy as np

from pdserve.workers.model.families import SWIGLU_ALPHA, SWIGLU_LIMIT
from pdserve.workers.model.scalar_math import exp32

_ONE = np.float32(1.0)
_ALPHA = np.float32(SWIGLU_ALPHA)
_LIMIT = np.float32(SWIGLU_LIMIT)


@numba.njit(nogil=True, parallel=True, cache=True)
def choose_experts(logits, is_normalised, chosen, weights):  # type: ignore[no-untyped-def]  # numba infers the types
    """Fill chosen and weights [T, K] with the experts of the largest logits [T, E], the lower number first of equals.

    Weights are softmax over the chosen ones (`is_normalised`) or over all.
    """
    num_experts, top_k = logits.shape[1], chosen.shape[1]
    for token in numba.prange(logits.shape[0]):
        row = logits[token]
        is_taken = np.zeros(num_experts, np.bool_)
        for place in range(top_k):
            best = -1
            for expert in range(num_experts):
                if not is_taken[expert] and (best < 0 or row[expert] > row[best]):
                    best = expert
            is_taken[best] = True
            chosen[token, place] = best
        peak = row[chosen[token, 0]]
        total = np.float32(0.0)
        for expert in range(num_experts):
            if is_taken[expert] or not is_normalised:
                total += exp32(row[expert] - peak)
        for place in range(top_k):
            weights[token, place] = exp32(row[chosen[token, place]] - peak) / total


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def add_weighted_rows(out, part, weights, tokens):  # type: ignore[no-untyped-def]  # numba infers the types
    """out[tokens] += weights * part, row by row."""
    for place in numba.prange(part.shape[0]):
        weight, row = weights[place], out[tokens[place]]
        for d in range(part.shape[1]):
            row[d] += weight * part[place, d]


@numba.njit(nogil=True, parallel=True, cache=True, fastmath={"contract", "nsz"})
def swiglu_clamped(gate_up, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Activation.SWIGLU_CLAMPED."""
    size = out.shape[1]
    for token in numba.prange(out.shape[0]):
        for d in range(size):
            gate = min(gate_up[token, d], _LIMIT)
            up = max(min(gate_up[token, size + d], _LIMIT), -_LIMIT)
            out[token, d] = gate / (_ONE + exp32(-_ALPHA * gate)) * (up + _ONE)
