"""Which model families the decoder covers, and what differs between them, as data.

`read_spec` turns a checkpoint folder's config.json into a `ModelSpec`. A family or a variant that is not covered is
refused with its name; nothing is guessed.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from pdserve.cluster.base.errors import CheckpointError, ConfigError, first_line
from pdserve.workers.model.rope import RopeSpec, read_rope

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class Activation(StrEnum):
    """Activation of the gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    SWIGLU_CLAMPED = "swiglu_clamped"
    """gate · sigmoid(SWIGLU_ALPHA gate) · (up + 1), gate and up clamped at SWIGLU_LIMIT (GPT-OSS)."""


class Router(StrEnum):
    """How a mixture layer weighs the experts that it takes."""

    SOFTMAX = "softmax"
    """The probabilities of all experts."""
    NORMALISED = "normalised"
    """Those of the taken ones, divided by their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al. 2017): each token goes through the `top_k` of largest router logits."""

    num_experts: int
    top_k: int
    intermediate_size: int
    router: Router
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its KV group and its rotary embedding (indexes into ModelSpec), and whether its MLP is a mixture."""

    group: int
    rope: int
    is_sparse: bool = False


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
    """Of the layers whose MLP is no mixture."""
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
    experts: ExpertsSpec | None = None
    attention_softcap: float = 0.0
    """Scores s become cap · tanh(s / cap); 0: they stay."""
    logit_softcap: float = 0.0
    has_sinks: bool = False
    """Each head has a logit that takes part in the softmax and has no value."""
    num_weights: int | None = None
    """All weights, where the decoder's shapes do not say how many there are (fallback_spec)."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_mlp_values(self) -> int:
        """Weights of the MLPs of all layers, with routers."""
        num_sparse = sum(layer.is_sparse for layer in self.layers)
        dense = (self.num_layers - num_sparse) * 3 * self.intermediate_size * self.hidden_size
        if self.experts is None:
            return dense
        each = 3 * self.experts.intermediate_size * self.hidden_size + self.hidden_size
        return dense + num_sparse * self.experts.num_experts * each

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ConfigError if the model cannot be split over so many tensor-parallel ranks."""
        key = f"engine.tensor_parallel {num_ranks}"
        if self.num_heads % num_ranks:
            raise ConfigError(f"{key}: does not divide the model's {self.num_heads} attention heads")
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            raise ConfigError(
                f"{key}: does not divide the model's {self.num_kv_heads} KV heads, nor is it a multiple of them"
            )
        if any(not layer.is_sparse for layer in self.layers) and self.intermediate_size % num_ranks:
            raise ConfigError(f"{key}: does not divide the model's intermediate_size {self.intermediate_size}")
        if self.experts is not None and self.experts.num_experts < num_ranks:
            raise ConfigError(f"{key}: the model has {self.experts.num_experts} experts to share out")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    has_qk_norm: bool = False
    always_qkv_bias: bool = False
    may_have_bias: bool = True
    """attention_bias of config.json says so; elsewhere transformers ignores it, and so do checkpoints."""
    has_sandwich_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    has_mixture: bool = False
    router: Router = Router.NORMALISED
    has_window_everywhere: bool = False
    """A sliding_window is every layer's, where config.json has no layer_types."""
    has_sinks: bool = False


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(may_have_bias=False, has_window_everywhere=True),
    "qwen2": _Family(may_have_bias=False, always_qkv_bias=True),
    "qwen3": _Family(has_qk_norm=True),
    "gemma2": _Family(has_sandwich_norms=True, norm_offset=1.0, scales_embedding=True),
    "gemma3_text": _Family(has_qk_norm=True, has_sandwich_norms=True, norm_offset=1.0, scales_embedding=True),
    "phi3": _Family(may_have_bias=False, has_window_everywhere=True),
    "mixtral": _Family(may_have_bias=False, has_mixture=True, has_window_everywhere=True),
    "qwen3_moe": _Family(has_qk_norm=True, has_mixture=True, router=Router.SOFTMAX, has_window_everywhere=True),
    "gpt_oss": _Family(has_mixture=True, has_sinks=True),
}


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face folder; raises CheckpointError."""
    raw = _read_raw_config(folder)
    if raw.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"{folder}/config.json: model_type {raw.get('model_type')!r} is none of the engine's own families "
            f"({', '.join(FAMILIES)}); engine.runner: transformers may run it"
        )
    config = read_config(folder)
    _refuse_unsupported(folder, config)
    family = FAMILIES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups, ropes, layers = _layout(folder, config, family, head_dim)
    scale_base = getattr(config, "query_pre_attn_scalar", None) or head_dim
    has_attention_bias = family.may_have_bias and bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        family=config.model_type,
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
        has_o_bias=has_attention_bias,
        has_mlp_bias=config.model_type == "llama" and bool(getattr(config, "mlp_bias", False)),
        has_sandwich_norms=family.has_sandwich_norms,
        norm_offset=family.norm_offset,
        is_head_tied=bool(config.tie_word_embeddings),
        eos_token_ids=eos_ids(folder, config),
        experts=_experts(folder, config, family) if family.has_mixture else None,
        attention_softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        has_sinks=family.has_sinks,
    )


def read_config(folder: Path) -> PretrainedConfig:
    """Return the configuration of a Hugging Face folder; raises CheckpointError, also for quantised weights."""
    raw = _read_raw_config(folder)
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            f"{folder}/config.json: quantization_config: quantised checkpoints are not supported yet "
            "(engine.linear: int8 quantises at load)"
        )
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # One that transformers does not know, or with values that it refuses.
        message = f"{folder}/config.json: model_type {raw.get('model_type')!r}: {first_line(error)}"
        raise CheckpointError(message) from error


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
    if getattr(config, "use_bidirectional_attention", None):
        raise CheckpointError(f"{folder}/config.json: use_bidirectional_attention is not supported yet")
    if not getattr(config, "is_causal", True):
        raise CheckpointError(f"{folder}/config.json: is_causal false is not supported: the model generates no text")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{folder}/config.json: num_attention_heads {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    constants = getattr(config, "swiglu_alpha", SWIGLU_ALPHA), getattr(config, "swiglu_limit", SWIGLU_LIMIT)
    if constants != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise CheckpointError(f"{folder}/config.json: swiglu_alpha and swiglu_limit {constants} are not supported yet")


def _activation(folder: Path, config: PretrainedConfig) -> Activation:
    if config.model_type == "gpt_oss":
        return Activation.SWIGLU_CLAMPED
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    try:
        return Activation(str(name))
    except ValueError as error:
        raise CheckpointError(f"{folder}/config.json: activation {name!r} is not supported yet") from error


def _experts(folder: Path, config: PretrainedConfig, family: _Family) -> ExpertsSpec:
    if not 1 <= config.num_experts_per_tok <= config.num_local_experts:
        raise CheckpointError(
            f"{folder}/config.json: num_experts_per_tok {config.num_experts_per_tok} of "
            f"{config.num_local_experts} experts"
        )
    is_normalised = family.router is Router.NORMALISED or bool(getattr(config, "norm_topk_prob", False))
    return ExpertsSpec(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        router=Router.NORMALISED if is_normalised else Router.SOFTMAX,
        has_bias=config.model_type == "gpt_oss",
    )


def _layout(
    folder: Path, config: PretrainedConfig, family: _Family, head_dim: int
) -> tuple[tuple[KVGroupSpec, ...], tuple[RopeSpec, ...], tuple[LayerSpec, ...]]:
    """Group layers by window (full attention first) and give each its rotary embedding."""
    window = getattr(config, "sliding_window", None) or 0
    same = SLIDING_ATTENTION if family.has_window_everywhere and window else FULL_ATTENTION
    kinds = list(getattr(config, "layer_types", None) or [same] * config.num_hidden_layers)
    unknown = set(kinds) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown or len(kinds) != config.num_hidden_layers:
        raise CheckpointError(f"{folder}/config.json: layer_types {sorted(unknown) or 'length'} is not supported yet")
    present = [kind for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if kind in kinds]
    if SLIDING_ATTENTION in present and not window:
        raise CheckpointError(f"{folder}/config.json: sliding layers need sliding_window")
    groups = tuple(
        KVGroupSpec(
            window=window if kind == SLIDING_ATTENTION else 0,
            layers=tuple(index for index, layer_kind in enumerate(kinds) if layer_kind == kind),
        )
        for kind in present
    )
    ropes = tuple(read_rope(folder, config, kind, head_dim) for kind in present)
    layers = tuple(
        LayerSpec(group=present.index(kind), rope=present.index(kind), is_sparse=_is_sparse(config, family, index))
        for index, kind in enumerate(kinds)
    )
    return groups, ropes, layers


def _is_sparse(config: PretrainedConfig, family: _Family, layer: int) -> bool:
    is_left_out = layer in (getattr(config, "mlp_only_layers", None) or [])
    return family.has_mixture and not is_left_out and (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0


def eos_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the tokens that end a text, of generation_config.json if there is one."""
    eos: int | list[int] | None = config.eos_token_id
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
