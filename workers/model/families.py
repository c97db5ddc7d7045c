"""Which model families the decoder covers, and what differs between them: all of it data, no code.

`read_spec` turns a checkpoint folder's config.json into a `ModelSpec`. A family or a variant that is not covered is
refused with its name; nothing is guessed.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from pdserve.cluster.base.errors import CheckpointError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


class Activation(StrEnum):
    """Activation of the gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of some layers: theta and how long contexts scale it (default, linear, llama3)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its KV group and its rotary embedding (indexes into ModelSpec)."""

    group: int
    rope: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that share a window, so also block tables. window 0: full attention."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder needs to know of a model."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_eps: float
    activation: Activation
    layers: tuple[LayerSpec, ...]
    groups: tuple[KVGroupSpec, ...]
    ropes: tuple[RopeSpec, ...]
    attention_scale: float
    embedding_scale: float
    has_qk_norm: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_sandwich_norms: bool
    norm_offset: float
    is_head_tied: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV bytes of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    has_qk_norm: bool = False
    always_qkv_bias: bool = False
    has_sandwich_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False


FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(always_qkv_bias=True),
    "qwen3": _Family(has_qk_norm=True),
    "gemma3_text": _Family(has_qk_norm=True, has_sandwich_norms=True, norm_offset=1.0, scales_embedding=True),
}


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face folder; raises CheckpointError."""
    raw = _read_raw_config(folder)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{folder}/config.json: model_type {model_type!r} is not supported yet; supported: {', '.join(FAMILIES)}"
        )
    if raw.get("quantization_config") is not None:
        raise CheckpointError(f"{folder}/config.json: quantization_config: quantised checkpoints are not supported yet")
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    _refuse_unsupported(folder, config)
    family = FAMILIES[str(model_type)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups, ropes, layers = _layout(folder, config)
    scale_base = getattr(config, "query_pre_attn_scalar", None) or head_dim
    has_attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        family=str(model_type),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        rms_eps=config.rms_norm_eps,
        activation=_activation(folder, config),
        layers=layers,
        groups=groups,
        ropes=ropes,
        attention_scale=scale_base**-0.5,
        embedding_scale=math.sqrt(config.hidden_size) if family.scales_embedding else 1.0,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.always_qkv_bias or has_attention_bias,
        has_o_bias=has_attention_bias and not family.always_qkv_bias,
        has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
        has_sandwich_norms=family.has_sandwich_norms,
        norm_offset=family.norm_offset,
        is_head_tied=bool(config.tie_word_embeddings),
        eos_token_ids=_eos_ids(folder, config),
    )


def _read_raw_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: the top level must be an object")
    return raw


def _refuse_unsupported(folder: Path, config: PretrainedConfig) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, key, None):
            raise CheckpointError(f"{folder}/config.json: {key} is not supported yet")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{folder}/config.json: num_attention_heads {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )


def _activation(folder: Path, config: PretrainedConfig) -> Activation:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    try:
        return Activation(str(name))
    except ValueError as error:
        raise CheckpointError(f"{folder}/config.json: activation {name!r} is not supported yet") from error


def _rope(folder: Path, parameters: dict[str, float | int | str]) -> RopeSpec:
    kind = str(parameters.get("rope_type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"{folder}/config.json: rope_type {kind!r} is not supported yet")
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{folder}/config.json: partial_rotary_factor is not supported yet")
    return RopeSpec(
        theta=float(parameters["rope_theta"]),
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 1.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", 0)),
    )


def _layout(
    folder: Path, config: PretrainedConfig
) -> tuple[tuple[KVGroupSpec, ...], tuple[RopeSpec, ...], tuple[LayerSpec, ...]]:
    """Group layers by window (full attention first) and give each its rotary embedding."""
    kinds = list(getattr(config, "layer_types", None) or [FULL_ATTENTION] * config.num_hidden_layers)
    unknown = set(kinds) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown or len(kinds) != config.num_hidden_layers:
        raise CheckpointError(f"{folder}/config.json: layer_types {sorted(unknown) or 'length'} is not supported yet")
    present = [kind for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if kind in kinds]
    if SLIDING_ATTENTION in present and not config.sliding_window:
        raise CheckpointError(f"{folder}/config.json: sliding layers need sliding_window")
    parameters = config.rope_parameters
    per_kind = {kind: parameters.get(kind, parameters) for kind in present}
    groups = tuple(
        KVGroupSpec(
            window=config.sliding_window if kind == SLIDING_ATTENTION else 0,
            layers=tuple(index for index, layer_kind in enumerate(kinds) if layer_kind == kind),
        )
        for kind in present
    )
    ropes = tuple(_rope(folder, per_kind[kind]) for kind in present)
    layers = tuple(LayerSpec(group=present.index(kind), rope=present.index(kind)) for kind in kinds)
    return groups, ropes, layers


def _eos_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    eos: int | list[int] | None = config.eos_token_id
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
