"""Builds a model from a checkpoint: fuses, packs and places its weights.

Matrices are packed into per-process copies and their stored form is not kept; the embedding stays memory-mapped in its
stored dtype on CPU (rows are converted when they are looked up).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.cluster.base.config import AttentionKind, LinearKind
from pdserve.cluster.base.errors import CheckpointError
from pdserve.workers.attention.numba_cpu import NumbaAttention
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.model.checkpoint import Checkpoint
from pdserve.workers.model.decoder import Decoder, Layer
from pdserve.workers.model.families import ModelSpec, read_spec
from pdserve.workers.model.head import VOCABULARY_TILE, Head
from pdserve.workers.model.linear import Linear, LinearFactory
from pdserve.workers.model.numba_ops import NumbaOps
from pdserve.workers.model.ops import QKVParameters
from pdserve.workers.model.rope import position_tables
from pdserve.workers.model.torch_ops import TorchOps

SELF_TEST_TOKENS = 64
"""Positions that the self-test may use, whatever the length limit."""
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        notes: why it is not in the bitwise class; empty when it may be.
    """

    spec: ModelSpec
    decoder: Decoder
    head: Head
    digest: str
    notes: tuple[str, ...]


def load_model(
    folder: Path, *, linear: LinearKind, attention: AttentionKind, device: torch.device, max_model_len: int
) -> LoadedModel:
    """Load the model in `folder` (Hugging Face layout). Raises CheckpointError."""
    if attention is AttentionKind.NUMBA and device.type != "cpu":
        raise CheckpointError(f"engine.attention numba runs on cpu only, not on {device}")
    checkpoint = Checkpoint(folder)
    try:
        return _Loader(read_spec(folder), checkpoint, linear, attention, device, max_model_len).load()
    finally:
        checkpoint.close()


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        linear: LinearKind,
        attention: AttentionKind,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._attention = attention
        self._device = device
        self._factory = LinearFactory(linear, device)
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in checkpoint]
        if not found:
            raise CheckpointError("the checkpoint has no tensor model.embed_tokens.weight")
        self._prefix = found[0]
        # The self-test runs before any limit of a request applies.
        max_position = max(max_model_len, SELF_TEST_TOKENS)
        self._tables = [
            tuple(table.to(device) for table in position_tables(rope, spec.head_dim, max_position))
            for rope in spec.ropes
        ]

    def load(self) -> LoadedModel:
        spec = self._spec
        is_numba = self._attention is AttentionKind.NUMBA
        embedding = self._checkpoint.tensor(f"{self._prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        layers = [self._layer(index) for index in range(spec.num_layers)]
        head = self._head(embedding)
        decoder = Decoder(
            spec,
            embedding=embedding.to(self._device),
            layers=layers,
            final_norm=self._norm("norm", spec.hidden_size),
            ops=NumbaOps() if is_numba else TorchOps(),
            attention=NumbaAttention() if is_numba else TorchAttention(),
        )
        notes = list(self._factory.notes)
        if not is_numba:
            notes.append("attention backend torch")
        return LoadedModel(
            spec=spec,
            decoder=decoder,
            head=head,
            digest=self._checkpoint.digest(),
            notes=tuple(notes),
        )

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._checkpoint.tensor(f"{self._prefix}{name}.weight", (size,)).float()
        return (weight + self._spec.norm_offset).to(self._device)

    def _pack(self, names: list[str], sizes: list[int], in_features: int, *, has_bias: bool) -> Linear:
        weights = [
            self._checkpoint.tensor(f"{self._prefix}{name}.weight", (size, in_features))
            for name, size in zip(names, sizes, strict=True)
        ]
        bias = None
        if has_bias:
            bias = torch.cat(
                [
                    self._checkpoint.tensor(f"{self._prefix}{name}.bias", (size,))
                    for name, size in zip(names, sizes, strict=True)
                ]
            )
        return self._factory.pack(torch.cat(weights), bias)

    def _layer(self, index: int) -> Layer:
        spec, at = self._spec, f"layers.{index}"
        hidden, size = spec.hidden_size, spec.head_dim
        query_size, kv_size = spec.num_heads * size, spec.num_kv_heads * size
        cos, sin = self._tables[spec.layers[index].rope]
        mlp_norm = "pre_feedforward_layernorm" if spec.has_sandwich_norms else "post_attention_layernorm"
        return Layer(
            qkv=self._pack(
                [f"{at}.self_attn.{name}_proj" for name in "qkv"],
                [query_size, kv_size, kv_size],
                hidden,
                has_bias=spec.has_qkv_bias,
            ),
            qkv_parameters=QKVParameters(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=size,
                group=spec.layers[index].group,
                query_norm=self._norm(f"{at}.self_attn.q_norm", size) if spec.has_qk_norm else None,
                key_norm=self._norm(f"{at}.self_attn.k_norm", size) if spec.has_qk_norm else None,
                cos=cos,
                sin=sin,
                eps=spec.rms_eps,
            ),
            attention_out=self._pack([f"{at}.self_attn.o_proj"], [hidden], query_size, has_bias=spec.has_o_bias),
            gate_up=self._pack(
                [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"],
                [spec.intermediate_size] * 2,
                hidden,
                has_bias=spec.has_mlp_bias,
            ),
            down=self._pack([f"{at}.mlp.down_proj"], [hidden], spec.intermediate_size, has_bias=spec.has_mlp_bias),
            input_norm=self._norm(f"{at}.input_layernorm", hidden),
            mlp_norm=self._norm(f"{at}.{mlp_norm}", hidden),
            post_attention_norm=self._post_norm(f"{at}.post_attention_layernorm"),
            post_mlp_norm=self._post_norm(f"{at}.post_feedforward_layernorm"),
        )

    def _post_norm(self, name: str) -> torch.Tensor | None:
        return self._norm(name, self._spec.hidden_size) if self._spec.has_sandwich_norms else None

    def _head(self, embedding: torch.Tensor) -> Head:
        spec = self._spec
        if spec.is_head_tied:
            weight = embedding
        else:
            weight = self._checkpoint.tensor("lm_head.weight", (spec.vocab_size, spec.hidden_size))
        tiles = [self._factory.pack(tile) for tile in torch.split(weight, VOCABULARY_TILE)]
        return Head(tiles, spec.vocab_size)
