"""The operations between linears in plain torch, on any device: the reference for the numba kernels."""

import torch

from pdserve.workers.attention.protocol import StepMetadata
from pdserve.workers.kv.rows import quantize_rows
from pdserve.workers.model.families import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Router
from pdserve.workers.model.ops import QKVParameters


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


class TorchOps:
    """Ops on tensors of any device."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops.norm."""
        return _norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, post: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See Ops.add_norm."""
        x += delta if post is None else _norm(delta, post, eps)
        return _norm(x, weight, eps)

    def store_qkv(
        self, qkv: torch.Tensor, parameters: QKVParameters, kv: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """See Ops.store_qkv."""
        heads = qkv.float().view(qkv.shape[0], -1, parameters.head_dim)
        sizes = [parameters.num_heads, parameters.num_kv_heads, parameters.num_kv_heads]
        query, key, value = torch.split(heads, sizes, dim=1)
        if parameters.query_norm is not None and parameters.key_norm is not None:
            query = _norm(query, parameters.query_norm, parameters.eps)
            key = _norm(key, parameters.key_norm, parameters.eps)
        tensors = step.tensors(qkv.device)
        cos, sin = parameters.cos[tensors.positions][:, None], parameters.sin[tensors.positions][:, None]
        place = tensors.groups[parameters.group]
        blocks, offsets = place.token_blocks, place.token_offsets
        for side, rows in enumerate((_rotate(key, cos, sin), value)):
            kv[blocks, side, :, offsets] = quantize_rows(rows) if kv.dtype == torch.int8 else rows.to(kv.dtype)
        return _rotate(query, cos, sin)

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See Ops.activate."""
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == Activation.SWIGLU_CLAMPED:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
        if activation == Activation.GELU_TANH:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    def route(self, logits: torch.Tensor, top_k: int, kind: Router) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops.route."""
        order = logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
        if kind is Router.NORMALISED:
            return torch.softmax(logits.gather(1, order), dim=-1), order
        return torch.softmax(logits, dim=-1).gather(1, order), order

    def add_weighted(self, out: torch.Tensor, part: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor) -> None:
        """See Ops.add_weighted."""
        out[tokens] += part * weights[:, None]
