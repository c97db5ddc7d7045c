"""What a decoder layer is made of: weights of one rank, and the MLP, dense or a mixture of experts.

Shape letters: T tokens, H hidden size, F intermediate size, E experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.workers.attention.protocol import AttentionParameters
from pdserve.workers.model.families import Activation, Router
from pdserve.workers.model.linear import Linear
from pdserve.workers.model.ops import Ops, QKVParameters
from pdserve.workers.model.parallel import RankGroup


class Mlp(Protocol):
    """What a layer does with each token by itself."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum [T, H] for hidden [T, H]."""


class DenseMlp:
    """down(activation(gate) * up): of this rank, a part of the inner width."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._ops = ops
        self._activation = activation

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Mlp."""
        return self._down(self._ops.activate(self._gate_up(hidden), self._activation))


class SparseMlp:
    """A mixture of experts: of this rank, some of the experts, whole.

    Every rank computes the router. The tokens of an expert go through it together; what a token's experts say is added
    up in the order of their numbers, so a token's bits do not depend on its neighbours.
    """

    def __init__(
        self, router: Linear, experts: Sequence[DenseMlp], ops: Ops, *, first_expert: int, top_k: int, kind: Router
    ) -> None:
        """`experts` are those from `first_expert` on."""
        self._router = router
        self._experts = experts
        self._ops = ops
        self._first_expert = first_expert
        self._top_k = top_k
        self._kind = kind

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Mlp."""
        weights, chosen = self._ops.route(self._router(hidden), self._top_k, self._kind)
        out = torch.zeros_like(hidden)
        for number, tokens, places in group_by_expert(chosen):
            place = number - self._first_expert
            if 0 <= place < len(self._experts):
                spoken = self._experts[place](hidden[tokens])
                self._ops.add_weighted(out, spoken, weights[tokens, places], tokens)
        return out


def group_by_expert(chosen: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return, for each expert that is taken, in order: its number, its tokens, and which choice of each it is.

    Args:
        chosen: int64 [T, K], distinct in a row.
    """
    if not len(chosen):
        return []
    top_k = chosen.shape[1]
    experts, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(experts).tolist()
    groups = []
    start = 0
    for number, count in enumerate(counts):
        if count:
            part = order[start : start + count]
            groups.append((number, part // top_k, part % top_k))
            start += count
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer. Post norms exist only in families with sandwich norms."""

    qkv: Linear
    qkv_parameters: QKVParameters
    attention: AttentionParameters
    attention_out: Linear
    mlp: Mlp
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attention_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None


class Embedding:
    """The vectors of tokens; of this rank, those of some tokens."""

    def __init__(self, weight: torch.Tensor, scale: float, group: RankGroup, *, first_token: int) -> None:
        """`weight` [V / ranks, H], in any float dtype."""
        self._weight = weight
        self._scale = scale
        self._group = group
        self._first_token = first_token

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return fp32 [T, H] for token ids [T]."""
        if self._group.size == 1:
            x = self._weight[token_ids].float()
        else:
            places = token_ids - self._first_token
            is_mine = (places >= 0) & (places < len(self._weight))
            part = self._weight[torch.where(is_mine, places, 0)].float()
            x = self._group.all_reduce(torch.where(is_mine[:, None], part, 0.0))
        if self._scale != 1.0:
            x *= self._scale
        return x
