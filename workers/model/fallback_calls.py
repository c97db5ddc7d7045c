"""How a model of transformers asks for attention: by name, with options and a mask; and what of that the engine knows.

The masks are the truth: transformers' own code computes by them and takes a window among the options for a hint. So a
probe, a run without weights, is given masks that tell by which rule they were made, and the rule is tried out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pdserve.cluster.base.errors import CheckpointError

ATTENTION_NAME = "pdserve"
PROBE_NAME = "pdserve_probe"
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
FAR = 1 << 17
"""A token behind every window."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of batch, head, query position and key position: whether the query sees the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    has_sinks: bool


class ModelRun(Protocol):
    """Whatever answers the attention calls of a model."""

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
        """Return [1, T, Hq, D] for query [1, Hq, T, D], key and value [1, Hkv, T, D]. Raises CheckpointError."""


class Holder:
    """Who answers the attention layers of one model: some architectures do not hand options through to them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.run: ModelRun | None = None
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                # Not a parameter and no submodule: a plain attribute.
                object.__setattr__(module, HOLDER, self)


class RuleMask(torch.Tensor):
    """The mask of a probe: empty, but for the rule that makes it."""

    rule: MaskRule


def _make_mask(*, mask_function: MaskRule, **_: Any) -> RuleMask:
    """See transformers' AttentionMaskInterface."""
    mask: RuleMask = torch.empty(1, 1, 1, 1, device="meta").as_subclass(RuleMask)
    mask.rule = mask_function
    return mask


def window_of(mask: torch.Tensor | None) -> int:
    """Return the window of a probe's mask, 0 for all that came before. Raises CheckpointError for any other rule."""
    rule = getattr(mask, "rule", None)
    if rule is None:
        raise CheckpointError("its attention has a mask of its own")
    seen = _seen(rule, FAR)
    window = int(seen.sum())
    if window == FAR + 1:
        window = 0
    last = window or FAR
    for position in (0, 1, last - 1, last, last + 1, 3 * last // 2, FAR - 1, FAR):
        first = max(0, position - window + 1) if window else 0
        expected = torch.zeros(FAR + 2, dtype=torch.bool)
        expected[first : position + 1] = True
        if position <= FAR and not torch.equal(_seen(rule, position), expected):
            raise CheckpointError("its attention is neither causal nor causal within a window")
    return window


def _seen(rule: MaskRule, position: int) -> torch.Tensor:
    """Return which of the keys 0 to FAR + 1 the query at a position sees."""
    keys, zero = torch.arange(FAR + 2, device="cpu"), torch.zeros((), dtype=torch.long, device="cpu")
    try:
        return rule(zero, zero, zero + position, keys).expand(keys.shape)
    except (RuntimeError, NotImplementedError, IndexError) as error:
        # One that looks at the tokens, of which the probe has none.
        raise CheckpointError("its attention mask depends on more than positions") from error


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """See transformers' AttentionInterface."""
    run: ModelRun | None = getattr(module, HOLDER).run
    assert run is not None, "the model runs for someone"
    known = USED_OPTIONS | IDLE_OPTIONS
    odd = sorted(name for name, value in options.items() if name not in known and value is not None)
    if odd:
        raise CheckpointError(f"its attention uses {', '.join(odd)}")
    if key.shape != value.shape:
        raise CheckpointError(f"keys are {tuple(key.shape[1:])}, values {tuple(value.shape[1:])}")
    sinks = options.get("s_aux")
    scale = options.get("scaling")
    call = LayerCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        softcap=float(options.get("softcap") or 0.0),
        has_sinks=sinks is not None,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]  # of a library's module
    return run.attend(layer, query, key, value, call, sinks, attention_mask), None


def register() -> None:
    """Make the two names known to transformers. A run over the paged KV needs no masks, so its name has none."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionInterface.register(PROBE_NAME, _attend)
    AttentionMaskInterface.register(PROBE_NAME, _make_mask)
