"""The operations between linears, behind one protocol: numba on CPU, torch on any device.

Shape letters: T tokens, H hidden size, F intermediate size, Hq/Hkv heads, D head size, E experts, K of a token.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.workers.attention.protocol import StepMetadata
from pdserve.workers.model.families import Activation, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVParameters:
    """What turns a layer's fused projection into query, key and value. Norm weights are absent (None) or [D].

    cos and sin [positions, R / 2]: the first R dimensions of a head are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: int
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float


class Ops(Protocol):
    """Operations of a decoder layer that are no matrix products. Norm weights already hold the family's offset."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return RMSNorm(x) * weight, [T, H]."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, post: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add delta (normed by `post` if given) to x in place; return RMSNorm(x) * weight."""

    def store_qkv(
        self, qkv: torch.Tensor, parameters: QKVParameters, kv: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Norm and rotate query and key, write key and value to their blocks; return query [T, Hq, D]."""

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return activation(gate) * up, [T, F], for gate_up [T, 2F]."""

    def route(self, logits: torch.Tensor, top_k: int, kind: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [T, K] and the numbers [T, K], int64, of the experts with the largest logits [T, E].

        Of equal ones the lower number comes first.
        """

    def add_weighted(self, out: torch.Tensor, part: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add weights [t] times part [t, H] to the rows `tokens` [t] of out [T, H]."""
