"""The decoder: one forward pass over a step's tokens, on one rank.

A layer is five calls: project, store and attend, project, MLP. What differs between families is in ModelSpec and in
which parts a layer holds. Shape letters: T tokens, S sampled rows, H hidden size.
"""

from collections.abc import Callable, Sequence

import torch

from pdserve.workers.attention.protocol import AttentionBackend, StepMetadata
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.layers import Embedding, Layer
from pdserve.workers.model.ops import Ops
from pdserve.workers.model.parallel import RankGroup


class Decoder:
    """The layers of a model, without its head."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        eps: float,
        ops: Ops,
        attention: AttentionBackend,
        group: RankGroup,
    ) -> None:
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._eps = eps
        self._ops = ops
        self._attention = attention
        self._group = group

    def forward(
        self,
        token_ids: torch.Tensor,
        step: StepMetadata,
        store: KVStore,
        logits_indices: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the KV of the step's tokens and return the normed hidden states of `logits_indices`.

        Args:
            token_ids: [T] int64.
            step: metadata of the same T tokens.
            store: receives keys and values of this rank's heads; read by attention.
            logits_indices: [S] int64, indexes into T.
            on_layer: called with a layer's number when its KV is written.

        Returns:
            fp32 [S, H], the same on every rank.
        """
        ops, all_reduce = self._ops, self._group.all_reduce
        x = self._embedding(token_ids)
        hidden = ops.norm(x, self._layers[0].input_norm, self._eps)
        for index, layer in enumerate(self._layers):
            query = ops.store_qkv(layer.qkv(hidden), layer.qkv_parameters, store.layer(index), step)
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(query, store.layer(index), step, layer.attention)
            is_last = index + 1 == len(self._layers)
            if is_last:
                # From here on a token meets no other one: go on with the sampled ones only.
                x, attended = x[logits_indices], attended[logits_indices]
                if not len(x):
                    return x
            delta = all_reduce(layer.attention_out(attended))
            hidden = ops.add_norm(x, delta, layer.post_attention_norm, layer.mlp_norm, self._eps)
            delta = all_reduce(layer.mlp(hidden))
            next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
            hidden = ops.add_norm(x, delta, layer.post_mlp_norm, next_norm, self._eps)
        return hidden
