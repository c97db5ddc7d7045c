"""What the engine needs to know of a model that transformers' code runs: learnt from a run without weights."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from pdserve.cluster.base.errors import CheckpointError, first_line
from pdserve.workers.model.fallback_calls import PROBE_NAME, Holder, LayerCall, register, window_of
from pdserve.workers.model.families import Activation, KVGroupSpec, LayerSpec, ModelSpec, eos_ids, read_config

UNSTEADY_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that transformers' code scales by the longest text of a batch, so that texts change each other."""


@dataclass(slots=True)
class _Probe:
    """Notes what is asked. See ModelRun."""

    calls: dict[int, LayerCall] = field(default_factory=dict)
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    num_weights: int = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: LayerCall,
        sinks: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ModelRun."""
        if layer in self.calls:
            raise CheckpointError(f"layer {layer} attends twice")
        self.calls[layer] = call
        self.masks[layer] = mask
        return query.transpose(1, 2)

    def find_windows(self) -> None:
        """Try the masks out: where tensors have values again. Raises CheckpointError."""
        found: dict[int, int] = {}
        for layer, mask in self.masks.items():
            if id(mask) not in found:
                found[id(mask)] = window_of(mask)
            self.windows[layer] = found[id(mask)]


def read_fallback_spec(folder: Path) -> ModelSpec:
    """Return what the engine needs to know of any decoder that transformers runs; raises CheckpointError."""
    config = read_config(folder)
    _refuse_unsteady_rope(folder, config)
    probe = _probe(folder, config)
    calls, windows_of = probe.calls, probe.windows
    first = calls[0]
    windows = sorted(set(windows_of.values()))
    if any((call.num_kv_heads, call.head_dim) != (first.num_kv_heads, first.head_dim) for call in calls.values()):
        raise _refusal(folder, config, "its layers have unlike KV heads")
    if any((call.softcap, call.has_sinks) != (first.softcap, first.has_sinks) for call in calls.values()):
        raise _refusal(folder, config, "its layers have unlike soft caps or sinks")
    return ModelSpec(
        family=f"transformers:{config.model_type}",
        hidden_size=config.hidden_size,
        intermediate_size=0,
        num_weights=probe.num_weights,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        vocab_size=config.vocab_size,
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        rms_eps=0.0,
        activation=Activation.SILU,
        layers=tuple(LayerSpec(group=windows.index(windows_of[layer]), rope=0) for layer in range(len(calls))),
        groups=tuple(
            KVGroupSpec(
                window=window, layers=tuple(layer for layer in range(len(calls)) if windows_of[layer] == window)
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
        attention_softcap=first.softcap,
        has_sinks=first.has_sinks,
        eos_token_ids=eos_ids(folder, config),
    )


def _refusal(folder: Path, config: PretrainedConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}/config.json: model_type {config.model_type!r} cannot be run by engine.runner transformers: {why}"
    )


def _refuse_unsteady_rope(folder: Path, config: PretrainedConfig) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One for the model, or one for each kind of layer.
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    for part in each:
        if part.get("rope_type") in UNSTEADY_ROPES:
            raise _refusal(folder, config, f"rope_type {part['rope_type']!r} makes a text depend on its neighbours")


def _probe(folder: Path, config: PretrainedConfig) -> _Probe:
    """Run the model on one token without weights; return what each layer asks of attention."""
    register()
    probe = _Probe()
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME, dtype=torch.bfloat16)
            token = torch.zeros(1, 1, dtype=torch.long)
            Holder(model).run = probe
            probe.num_weights = sum(parameter.numel() for parameter in model.parameters())
            # A mask of all tokens: without one, the positions, which have no values here, are looked at.
            model(input_ids=token, position_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
        probe.find_windows()
    except CheckpointError as error:
        raise _refusal(folder, config, str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        # Whatever a model's code says that does not fit: it is transformers' own.
        first = first_line(error)
        if PROBE_NAME in first:
            first = "it looks attention up in a table of its own"
        raise _refusal(folder, config, first) from error
    if sorted(probe.calls) != list(range(config.num_hidden_layers)):
        raise _refusal(folder, config, "its layers do not look attention up")
    return probe
