"""Builds one rank of a model from a checkpoint: reads, packs and places its weights.

Matrices are packed into per-process copies and their stored form is not kept; the embedding stays memory-mapped in its
stored dtype on CPU (rows are converted when they are looked up).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pdserve.cluster.base.engine_config import AttentionKind, LinearKind, NumericsKind, RunnerKind
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.attention.choice import AttentionShape, ChosenAttention, choose_attention
from pdserve.workers.attention.protocol import AttentionParameters, StepMetadata
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.checkpoint import Checkpoint
from pdserve.workers.model.decoder import Decoder
from pdserve.workers.model.fallback import load_fallback
from pdserve.workers.model.fallback_spec import read_fallback_spec
from pdserve.workers.model.families import ModelSpec, read_spec
from pdserve.workers.model.head import VOCABULARY_TILE, Head
from pdserve.workers.model.layers import DenseMlp, Embedding, Layer, Mlp, SparseMlp
from pdserve.workers.model.linear import Linear, LinearFactory
from pdserve.workers.model.numba_ops import NumbaOps
from pdserve.workers.model.ops import QKVParameters
from pdserve.workers.model.parallel import SOLO, RankGroup
from pdserve.workers.model.rope import position_tables
from pdserve.workers.model.torch_ops import TorchOps
from pdserve.workers.model.weights import Matrix, RankWeights

SELF_TEST_TOKENS = 64
"""Positions that the self-test may use, whatever the length limit."""


class ForwardModel(Protocol):
    """What comes before the head."""

    def forward(
        self,
        token_ids: torch.Tensor,
        step: StepMetadata,
        store: KVStore,
        logits_indices: torch.Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One rank of a model, ready to run.

    Attributes:
        notes: why it is not in the bitwise class; empty when it may be.
    """

    spec: ModelSpec
    decoder: ForwardModel
    head: Head
    digest: str
    attention: AttentionKind
    notes: tuple[str, ...]
    group: RankGroup = SOLO


def read_model_spec(folder: Path, runner: RunnerKind) -> ModelSpec:
    """Return what the engine needs to know of the model in `folder`. Raises CheckpointError."""
    return read_fallback_spec(folder) if runner is RunnerKind.TRANSFORMERS else read_spec(folder)


def attention_shape(spec: ModelSpec, num_ranks: int, block_size: int, kv_dtype: KVDtype) -> AttentionShape:
    """Return what a rank's attention will be asked."""
    return AttentionShape(
        num_heads=spec.num_heads // num_ranks,
        num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
        head_dim=spec.head_dim,
        block_size=block_size,
        kv_dtype=kv_dtype,
        windows=tuple(group.window for group in spec.groups),
        softcap=spec.attention_softcap,
        has_sinks=spec.has_sinks,
    )


def load_model(
    folder: Path,
    *,
    linear: LinearKind,
    attention: AttentionKind,
    device: torch.device,
    max_model_len: int,
    block_size: int = 16,
    kv_dtype: KVDtype = KVDtype.FLOAT32,
    group: RankGroup = SOLO,
    runner: RunnerKind = RunnerKind.NATIVE,
    numerics: NumericsKind = NumericsKind.DEFAULT,
) -> LoadedModel:
    """Load a rank of the model in `folder` (Hugging Face layout). Raises CheckpointError or ConfigError."""
    spec = read_model_spec(folder, runner)
    spec.check_ranks(group.size)
    checkpoint = Checkpoint(folder)
    try:
        if runner is RunnerKind.TRANSFORMERS:
            chosen = choose_attention(attention, device, attention_shape(spec, 1, block_size, kv_dtype))
            decoder, head = load_fallback(folder, spec, chosen.backend, device)
            return LoadedModel(
                spec=spec,
                decoder=decoder,
                head=head,
                digest=checkpoint.digest(),
                attention=chosen.kind,
                notes=("engine.runner transformers",),
            )
        is_invariant = numerics is NumericsKind.INVARIANT
        shape = attention_shape(spec, group.size, block_size, kv_dtype)
        chosen = choose_attention(attention, device, shape, is_invariant=is_invariant)
        factory = LinearFactory(linear, device, is_invariant=is_invariant)
        return _Loader(spec, checkpoint, factory, chosen, device, max_model_len, group).load()
    finally:
        checkpoint.close()


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        factory: LinearFactory,
        attention: ChosenAttention,
        device: torch.device,
        max_model_len: int,
        group: RankGroup,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._weights = RankWeights(spec, checkpoint, group.rank, group.size)
        self._device = device
        self._group = group
        self._factory = factory
        self._attention = attention
        self._ops = NumbaOps() if attention.kind is AttentionKind.NUMBA else TorchOps()
        # The self-test runs before any limit of a request applies.
        self._tables = [
            tuple(
                table.to(device) for table in position_tables(rope, max(max_model_len, SELF_TEST_TOKENS), max_model_len)
            )
            for rope in spec.ropes
        ]

    def load(self) -> LoadedModel:
        spec, weights = self._spec, self._weights
        layers = [self._layer(index) for index in range(spec.num_layers)]
        tiles = [self._factory.pack(tile) for tile in torch.split(weights.head(), VOCABULARY_TILE)]
        decoder = Decoder(
            embedding=Embedding(
                weights.embedding().to(self._device),
                spec.embedding_scale,
                self._group,
                first_token=weights.first_token,
            ),
            layers=layers,
            final_norm=self._norm("norm", spec.hidden_size),
            eps=spec.rms_eps,
            ops=self._ops,
            attention=self._attention.backend,
            group=self._group,
        )
        notes = list(self._factory.notes)
        if not self._attention.is_invariant:
            notes.append(f"attention backend {self._attention.kind}")
        return LoadedModel(
            spec=spec,
            decoder=decoder,
            head=Head(tiles, spec.vocab_size, softcap=spec.logit_softcap, group=self._group),
            digest=self._checkpoint.digest(),
            attention=self._attention.kind,
            notes=tuple(notes),
            group=self._group,
        )

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._weights.norm(name, size).to(self._device)

    def _pack(self, matrix: Matrix, kind: LinearKind | None = None) -> Linear:
        return self._factory.pack(matrix.weight, matrix.bias, kind)

    def _layer(self, index: int) -> Layer:
        spec, weights, at = self._spec, self._weights, f"layers.{index}"
        hidden, size = spec.hidden_size, spec.head_dim
        group = spec.layers[index].group
        cos, sin = self._tables[spec.layers[index].rope]
        sinks = weights.sinks(f"{at}.self_attn")
        mlp_norm = "pre_feedforward_layernorm" if spec.has_sandwich_norms else "post_attention_layernorm"
        return Layer(
            qkv=self._pack(weights.query_key_value(f"{at}.self_attn")),
            qkv_parameters=QKVParameters(
                num_heads=weights.num_heads,
                num_kv_heads=weights.num_kv_heads,
                head_dim=size,
                group=group,
                query_norm=self._norm(f"{at}.self_attn.q_norm", size) if spec.has_qk_norm else None,
                key_norm=self._norm(f"{at}.self_attn.k_norm", size) if spec.has_qk_norm else None,
                cos=cos,
                sin=sin,
                eps=spec.rms_eps,
            ),
            attention=AttentionParameters(
                group=group,
                scale=spec.attention_scale,
                softcap=spec.attention_softcap,
                sinks=None if sinks is None else sinks.to(self._device),
            ),
            attention_out=self._pack(weights.attention_out(f"{at}.self_attn")),
            mlp=self._mixture(at) if spec.layers[index].is_sparse else self._dense(f"{at}.mlp"),
            input_norm=self._norm(f"{at}.input_layernorm", hidden),
            mlp_norm=self._norm(f"{at}.{mlp_norm}", hidden),
            post_attention_norm=self._post_norm(f"{at}.post_attention_layernorm"),
            post_mlp_norm=self._post_norm(f"{at}.post_feedforward_layernorm"),
        )

    def _dense(self, at: str) -> Mlp:
        weights = self._weights
        return DenseMlp(self._pack(weights.gate_up(at)), self._pack(weights.down(at)), self._ops, self._spec.activation)

    def _mixture(self, at: str) -> Mlp:
        spec, weights = self._spec, self._weights
        assert spec.experts is not None, "a mixture has experts"
        experts = []
        for number in range(weights.first_expert, weights.end_expert):
            gate_up, down = weights.expert(at, number)
            experts.append(DenseMlp(self._pack(gate_up), self._pack(down), self._ops, spec.activation))
        # A router is small, and what it says decides: it keeps its precision.
        router = self._pack(weights.router(at), LinearKind.FP32)
        return SparseMlp(
            router,
            experts,
            self._ops,
            first_expert=weights.first_expert,
            top_k=spec.experts.top_k,
            kind=spec.experts.router,
        )

    def _post_norm(self, name: str) -> torch.Tensor | None:
        return self._norm(name, self._spec.hidden_size) if self._spec.has_sandwich_norms else None
