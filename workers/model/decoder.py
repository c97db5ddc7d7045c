"""The decoder: one forward pass over a step's tokens.

A layer is five calls: project, store and attend, project, gated MLP. What differs between families is in ModelSpec
and in which norms a layer holds. Shape letters: T tokens, S sampled rows, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.workers.attention.protocol import AttentionBackend, StepMetadata
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.linear import Linear
from pdserve.workers.model.ops import Ops, QKVParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer. Post norms exist only in families with sandwich norms."""

    qkv: Linear
    qkv_parameters: QKVParameters
    attention_out: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """The layers of a model, without its head."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        ops: Ops,
        attention: AttentionBackend,
    ) -> None:
        self._spec = spec
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._ops = ops
        self._attention = attention

    def forward(
        self,
        token_ids: torch.Tensor,
        step: StepMetadata,
        store: KVStore,
        sample_tokens: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the KV of the step's tokens and return the normed hidden states of `sample_tokens`.

        Args:
            token_ids: [T] int64.
            step: metadata of the same T tokens.
            store: receives keys and values; read by attention.
            sample_tokens: [S] int64, indexes into T.
            on_layer: called with a layer's number when its KV is written.

        Returns:
            fp32 [S, H].
        """
        spec, ops = self._spec, self._ops
        x = self._embedding[token_ids].float()
        if spec.embedding_scale != 1.0:
            x *= spec.embedding_scale
        hidden = ops.norm(x, self._layers[0].input_norm, spec.rms_eps)
        for index, layer in enumerate(self._layers):
            parameters = layer.qkv_parameters
            query = ops.store_qkv(layer.qkv(hidden), parameters, store.layer(index), step)
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(query, store.layer(index), step, parameters.group, spec.attention_scale)
            is_last = index + 1 == len(self._layers)
            if is_last:
                # From here on a token meets no other one: go on with the sampled ones only.
                x, attended = x[sample_tokens], attended[sample_tokens]
                if not len(x):
                    return x
            delta = layer.attention_out(attended)
            hidden = ops.add_norm(x, delta, layer.post_attention_norm, layer.mlp_norm, spec.rms_eps)
            delta = layer.down(ops.activate(layer.gate_up(hidden), spec.activation))
            next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
            hidden = ops.add_norm(x, delta, layer.post_mlp_norm, next_norm, spec.rms_eps)
        return hidden
