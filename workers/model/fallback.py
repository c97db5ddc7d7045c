"""Runs architectures that the engine's own decoder does not cover, by transformers' code over the same paged KV.

transformers computes everything but attention, which it looks up by name (AttentionInterface): ours writes the step's
keys and values to their blocks and attends over the blocks. One rank, fp32 weights, tolerance class. What a model's
attention needs is learnt from a run without weights, on the meta device, so that it is known before anything is loaded.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pdserve.cluster.base.errors import CheckpointError
from pdserve.workers.attention.protocol import AttentionBackend, AttentionParameters, StepMetadata
from pdserve.workers.kv.rows import encode_rows
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.families import Activation, KVGroupSpec, LayerSpec, ModelSpec, eos_ids, read_config
from pdserve.workers.model.head import Head
from pdserve.workers.model.linear import PADDINGS, Linear
from pdserve.workers.model.parallel import SOLO

logger = logging.getLogger(__name__)

ATTENTION_NAME = "pdserve"
HOLDER = "_pdserve_holder"
USED_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
IDLE_OPTIONS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""What else an attention call may be given without meaning anything to it. Any other option is refused unless None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerCall:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    has_sinks: bool


@dataclass(slots=True)
class _Probe:
    """Notes what is asked, in a run without weights."""

    calls: dict[int, _LayerCall] = field(default_factory=dict)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, call: _LayerCall) -> torch.Tensor:
        if layer in self.calls:
            raise CheckpointError(f"layer {layer} attends twice")
        self.calls[layer] = call
        return query.transpose(1, 2)


@dataclass(slots=True)
class _PagedStep:
    """One step over the KV store."""

    step: StepMetadata
    store: KVStore
    attention: AttentionBackend
    groups: tuple[int, ...]
    """Of each layer."""
    on_layer: Callable[[int], None] | None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parameters: AttentionParameters
    ) -> torch.Tensor:
        """Return [1, T, Hq, D] for query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
        kv = self.store.layer(layer)
        place = self.step.tensors(kv.device).groups[parameters.group]
        blocks, offsets = place.token_blocks, place.token_offsets
        for side, rows in enumerate((key, value)):
            kv[blocks, side, :, offsets] = encode_rows(rows[0].transpose(0, 1).float(), self.store.kv_dtype)
        if self.on_layer is not None:
            self.on_layer(layer)
        heads = query[0].transpose(0, 1).float().contiguous()
        attended = self.attention.attend(heads, kv, self.step, parameters)
        return attended.view(heads.shape).to(query.dtype)[None]


_Run = _Probe | _PagedStep


class _Holder:
    """What the attention layers of one model do at present: some architectures do not hand options through to them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.run: _Run | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                # Not a parameter and no submodule: a plain attribute.
                object.__setattr__(module, HOLDER, self)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """See transformers' AttentionInterface."""
    run: _Run | None = getattr(module, HOLDER).run
    assert run is not None, "the model runs for someone"
    layer: int = module.layer_idx  # type: ignore[assignment]  # of a library's module
    known = USED_OPTIONS | IDLE_OPTIONS
    odd = sorted(name for name, value in options.items() if name not in known and value is not None)
    if odd or attention_mask is not None:
        raise CheckpointError(f"its attention uses {', '.join(odd) or 'a mask of its own'}")
    if key.shape != value.shape:
        raise CheckpointError(f"keys are {tuple(key.shape[1:])}, values {tuple(value.shape[1:])}")
    sinks = options.get("s_aux")
    scale = options.get("scaling")
    call = _LayerCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=int(options.get("sliding_window") or 0),
        softcap=float(options.get("softcap") or 0.0),
        has_sinks=sinks is not None,
    )
    if isinstance(run, _Probe):
        return run.attend(layer, query, key, call), None
    parameters = AttentionParameters(
        group=run.groups[layer],
        scale=call.scale,
        softcap=call.softcap,
        sinks=None if sinks is None else sinks.float().contiguous(),
    )
    return run.attend(layer, query, key, value, parameters), None


def _register() -> None:
    AttentionInterface.register(ATTENTION_NAME, _attend)


def read_fallback_spec(folder: Path) -> ModelSpec:
    """Return what the engine needs to know of any decoder that transformers runs; raises CheckpointError."""
    config = read_config(folder)
    calls = _probe(folder, config)
    first = calls[0]
    windows = sorted({call.window for call in calls.values()})
    if any((call.num_kv_heads, call.head_dim) != (first.num_kv_heads, first.head_dim) for call in calls.values()):
        raise _refusal(folder, config, "its layers have unlike KV heads")
    return ModelSpec(
        family=f"transformers:{config.model_type}",
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=config.vocab_size,
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        rms_eps=0.0,
        activation=Activation.SILU,
        layers=tuple(LayerSpec(group=windows.index(calls[layer].window), rope=0) for layer in range(len(calls))),
        groups=tuple(
            KVGroupSpec(
                window=window, layers=tuple(layer for layer in range(len(calls)) if calls[layer].window == window)
            )
            for window in windows
        ),
        ropes=(),
        attention_scale=first.scale,
        embedding_scale=1.0,
        has_qk_norm=False,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_sandwich_norms=False,
        norm_offset=0.0,
        is_head_tied=bool(config.tie_word_embeddings),
        eos_token_ids=eos_ids(folder, config),
    )


def _refusal(folder: Path, config: PretrainedConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}/config.json: model_type {config.model_type!r} cannot be run by engine.runner transformers: {why}"
    )


def _probe(folder: Path, config: PretrainedConfig) -> dict[int, _LayerCall]:
    """Run the model on one token without weights; return what each layer asks of attention."""
    _register()
    probe = _Probe()
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
            token = torch.zeros(1, 1, dtype=torch.long)
            _Holder(model).run = probe
            model(input_ids=token, position_ids=token, use_cache=False)
    except CheckpointError as error:
        raise _refusal(folder, config, str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        # Whatever a model's code says that does not fit: it is transformers' own.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _refusal(folder, config, first) from error
    if sorted(probe.calls) != list(range(config.num_hidden_layers)):
        raise _refusal(folder, config, "its layers do not look attention up")
    return probe.calls


class FallbackDecoder:
    """A model of transformers. See ForwardModel: what it returns are logits, and its head adds nothing."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, attention: AttentionBackend) -> None:
        self._model = model
        self._holder = _Holder(model)
        self._attention = attention
        self._groups = tuple(layer.group for layer in spec.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        step: StepMetadata,
        store: KVStore,
        sample_tokens: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the KV of the step's tokens and return fp32 logits [S, V] of `sample_tokens`; see Decoder.forward."""
        positions = step.tensors(token_ids.device).positions
        self._holder.run = _PagedStep(step, store, self._attention, self._groups, on_layer)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sample_tokens,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def load_fallback(
    folder: Path, spec: ModelSpec, attention: AttentionBackend, device: torch.device
) -> tuple[FallbackDecoder, Head]:
    """Load the model in `folder` by transformers' code, in fp32. Raises CheckpointError."""
    _register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, attn_implementation=ATTENTION_NAME
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    decoder = FallbackDecoder(model.to(device).eval(), spec, attention)
    identity = Linear(lambda logits: logits, PADDINGS[0], out_features=spec.vocab_size, memory_bytes=0)
    return decoder, Head([identity], spec.vocab_size, group=SOLO)
