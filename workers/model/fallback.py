"""Runs architectures that the engine's own decoder does not cover, by transformers' code over the same paged KV.

transformers computes everything but attention, which it looks up by name: ours writes the step's keys and values to
their blocks and attends over the blocks. One rank, fp32 weights, tolerance class. Whatever a model does with positions
or its neighbours shows when it is loaded: texts that are computed together, in parts, are compared with what the model
says of each of them alone.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdserve.cluster.base.errors import CheckpointError
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.workers.attention.protocol import AttentionBackend, AttentionParameters, StepMetadata, build_metadata
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.engine.plan import ForwardPlan
from pdserve.workers.kv.rows import encode_rows
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.fallback_calls import ATTENTION_NAME, Holder, LayerCall, register
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.head import Head
from pdserve.workers.model.linear import PADDINGS, Linear
from pdserve.workers.model.parallel import SOLO

logger = logging.getLogger(__name__)

PROBE_LENGTHS = (11, 6)
"""Lengths of the texts that are compared."""
PROBE_CHUNK = 6
"""Tokens of each in a step."""
MAX_LOGIT_ERROR = 0.02
"""How far a logit may be off, in standard deviations of all logits."""


@dataclass(slots=True)
class _PagedStep:
    """One step over the KV store. See ModelRun."""

    step: StepMetadata
    store: KVStore
    attention: AttentionBackend
    groups: tuple[int, ...]
    """Of each layer."""
    on_layer: Callable[[int], None] | None

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
        parameters = AttentionParameters(
            group=self.groups[layer],
            scale=call.scale,
            softcap=call.softcap,
            sinks=None if sinks is None else sinks.float().contiguous(),
        )
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


class FallbackDecoder:
    """A model of transformers. See ForwardModel: what it returns are logits, and its head adds nothing."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, attention: AttentionBackend) -> None:
        self._model = model
        self._holder = Holder(model)
        self._attention = attention
        self._groups = tuple(layer.group for layer in spec.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        step: StepMetadata,
        store: KVStore,
        logits_indices: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the KV of the step's tokens and return fp32 logits [S, V] of `logits_indices`; see Decoder.forward."""
        positions = step.tensors(token_ids.device).positions
        self._holder.run = _PagedStep(step, store, self._attention, self._groups, on_layer)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def load_fallback(
    folder: Path, spec: ModelSpec, attention: AttentionBackend, device: torch.device
) -> tuple[FallbackDecoder, Head]:
    """Load the model in `folder` by transformers' code, in fp32. Raises CheckpointError."""
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, attn_implementation=ATTENTION_NAME
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model = model.to(device).eval()
    _compare(folder, model, spec, device)
    decoder = FallbackDecoder(model, spec, attention)
    identity = Linear(lambda logits: logits, PADDINGS[0], out_features=spec.vocab_size, memory_bytes=0)
    return decoder, Head([identity], spec.vocab_size, group=SOLO)


def _compare(folder: Path, model: PreTrainedModel, spec: ModelSpec, device: torch.device) -> None:
    """Compute texts together, and each alone by the model's own attention. Raises CheckpointError if they differ."""
    texts = [torch.arange(3, 3 + length).mul(17).remainder(spec.vocab_size) for length in PROBE_LENGTHS]
    try:
        together = _logits_together(model, spec, texts, device)
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            alone = [model(input_ids=text.to(device)[None], use_cache=False).logits[0, -1].float() for text in texts]
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        # Whatever a model's code says that does not fit: it is transformers' own.
        raise CheckpointError(
            f"{folder}/config.json: model_type {model.config.model_type!r} cannot be run by engine.runner "
            f"transformers: {type(error).__name__}: {error}"
        ) from error
    for found, expected in zip(together, alone, strict=True):
        if (found - expected).abs().max() > MAX_LOGIT_ERROR * expected.std():
            raise CheckpointError(
                f"{folder}/config.json: model_type {model.config.model_type!r} cannot be run by engine.runner "
                "transformers: texts that are computed together differ from what its own code says of each alone"
            )


def _logits_together(
    model: PreTrainedModel, spec: ModelSpec, texts: list[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return the last logits [V] of each text, all computed together, in parts, over paged KV."""
    layout = KVLayout(
        model_digest="",
        kv_dtype=KVDtype.FLOAT32,
        block_size=16,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        groups=tuple(GroupLayout(window=group.window, layers=group.layers) for group in spec.groups),
    )
    store = KVStore(layout, num_blocks=[len(texts)] * len(spec.groups), device=device)
    decoder = FallbackDecoder(model, spec, TorchAttention())
    results: dict[int, torch.Tensor] = {}
    for first in range(0, max(PROBE_LENGTHS), PROBE_CHUNK):
        rows = [row for row, text in enumerate(texts) if len(text) > first]
        ends = [min(first + PROBE_CHUNK, len(texts[row])) for row in rows]
        plan = ForwardPlan(
            token_ids=torch.cat([texts[row][first:end] for row, end in zip(rows, ends, strict=True)]).int().numpy(),
            positions=np.concatenate([np.arange(first, end, dtype=np.int32) for end in ends]),
            row_starts=np.cumsum([0, *(end - first for end in ends)]).astype(np.int32),
            block_tables=tuple(np.array(rows, np.int32)[:, None] for _ in spec.groups),
        )
        step = build_metadata(plan, tuple(group.window for group in spec.groups), layout.block_size)
        last = torch.from_numpy(plan.row_starts[1:] - 1).long().to(device)
        with torch.inference_mode():
            logits = decoder.forward(torch.from_numpy(plan.token_ids).long().to(device), step, store, last)
        results.update(zip(rows, logits, strict=True))
    return [results[row] for row in range(len(texts))]
