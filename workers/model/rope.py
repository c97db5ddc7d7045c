"""Rotary position embeddings (RoFormer, Su et al. 2021): frequencies by kind, and tables of cos and sin.

How a kind scales its frequencies is transformers' knowledge (modeling_rope_utils): linear, llama3, yarn (Peng et al.
2023) and longrope (Ding et al. 2024). *dynamic* is refused: its frequencies follow the length of the text, so KV that
was computed earlier would be wrong.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.cluster.base.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotary embedding of some layers.

    The first 2 * len(frequencies) dimensions of a head are rotated; the others stay.
    """

    frequencies: tuple[float, ...]
    """Angle per position of each pair of dimensions."""
    factor: float = 1.0
    """Of cos and sin."""
    long_frequencies: tuple[float, ...] = ()
    """longrope: those of a deployment that allows texts beyond `original_max_position`."""
    original_max_position: int = 0

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self.frequencies)

    def chosen(self, max_tokens: int) -> tuple[float, ...]:
        """Return the frequencies where texts have at most `max_tokens`: one choice for all of them."""
        has_long = bool(self.long_frequencies) and max_tokens > self.original_max_position
        return self.long_frequencies if has_long else self.frequencies


def read_rope(folder: Path, config: PretrainedConfig, layer_type: str, head_dim: int) -> RopeSpec:
    """Return the rotary embedding of a configuration's layers of one type. Raises CheckpointError."""
    has_types = layer_type in config.rope_parameters
    parameters = config.rope_parameters[layer_type] if has_types else config.rope_parameters
    kind = str(parameters.get("rope_type", "default"))
    if kind not in KINDS:
        raise CheckpointError(
            f"{folder}/config.json: rope_type {kind!r} is not supported yet; supported: {', '.join(KINDS)}"
        )
    if kind == "default":
        size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return RopeSpec(frequencies=tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
    make = ROPE_INIT_FUNCTIONS[kind]
    layers = {"layer_type": layer_type} if has_types else {}
    try:
        frequencies, factor = make(config, torch.device("cpu"), **layers)
        if kind != "longrope":
            return RopeSpec(frequencies=tuple(frequencies.tolist()), factor=float(factor))
        original = int(parameters["original_max_position_embeddings"])
        long_frequencies, _ = make(config, torch.device("cpu"), seq_len=original + 1, **layers)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder}/config.json: rope_parameters of kind {kind!r}: {error!r}") from error
    return RopeSpec(
        frequencies=tuple(frequencies.tolist()),
        factor=float(factor),
        long_frequencies=tuple(long_frequencies.tolist()),
        original_max_position=original,
    )


def position_tables(rope: RopeSpec, num_positions: int, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each fp32 [num_positions, rotary_dim / 2], where texts have at most `max_tokens`."""
    frequencies = torch.tensor(rope.chosen(max_tokens), dtype=torch.float32)
    angles = torch.arange(num_positions).float()[:, None] * frequencies[None, :]
    return angles.cos() * rope.factor, angles.sin() * rope.factor
