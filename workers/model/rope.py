"""Rotary position tables: cos and sin for every position, computed once at load.

Frequencies follow RoFormer (Su et al. 2021); the llama3 scaling follows Llama 3.1's published rule: wavelengths over
original_max_position / low_freq_factor are divided by `factor`, those under original_max_position / high_freq_factor
stay, those between are interpolated.
"""

import math

import torch

from pdserve.workers.model.families import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return fp32 inverse frequencies, shape [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    is_between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(is_between, between, scaled)


def position_tables(rope: RopeSpec, head_dim: int, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each fp32 [max_position, head_dim / 2]."""
    angles = torch.arange(max_position).float()[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return angles.cos(), angles.sin()
