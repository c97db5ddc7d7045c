"""A rank's weights by what they are for, wherever a family's checkpoints keep them.

Query, key, value, gate and up come as rows of one matrix, ready to be fused; a rank reads only its own rows or columns
of what the checkpoint holds. Shape letters: H hidden size, F intermediate size of an MLP, D head size, E experts.
"""

from dataclasses import dataclass

import torch

from pdserve.cluster.base.errors import CheckpointError
from pdserve.workers.model.checkpoint import Checkpoint
from pdserve.workers.model.families import ModelSpec
from pdserve.workers.model.parallel import part_of

PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight [N, K], and its bias [N] if it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class RankWeights:
    """What one rank holds of a checkpoint."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, rank: int, size: int) -> None:
        """Raises CheckpointError if the checkpoint has no embedding."""
        self._spec = spec
        self._checkpoint = checkpoint
        self._rank = rank
        self._size = size
        found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in checkpoint]
        if not found:
            raise CheckpointError("the checkpoint has no tensor model.embed_tokens.weight")
        self._prefix = found[0]
        self.num_heads = spec.num_heads // size
        self.num_kv_heads = max(1, spec.num_kv_heads // size)
        self.first_head = rank * self.num_heads
        # With fewer KV heads than ranks, a head is held by the ranks of its query heads.
        self.first_kv_head = self.first_head * spec.num_kv_heads // spec.num_heads
        self.first_token, self.end_token = part_of(spec.vocab_size, rank, size)
        num_experts = 0 if spec.experts is None else spec.experts.num_experts
        self.first_expert, self.end_expert = part_of(num_experts, rank, size)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return a norm's weight [size] in fp32, with the family's offset."""
        weight = self._checkpoint.tensor(f"{self._prefix}{name}.weight", (size,)).float()
        return weight + self._spec.norm_offset

    def embedding(self) -> torch.Tensor:
        """Return the embedding of this rank's tokens [V / ranks, H], in its stored dtype."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._checkpoint.tensor(f"{self._prefix}embed_tokens.weight", shape)[self.first_token : self.end_token]

    def head(self) -> torch.Tensor:
        """Return the head's rows of this rank's tokens [V / ranks, H]."""
        if self._spec.is_head_tied:
            return self.embedding()
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._checkpoint.tensor("lm_head.weight", shape)[self.first_token : self.end_token]

    def query_key_value(self, at: str) -> Matrix:
        """Return the fused projection of this rank's heads [(Hq + 2 Hkv) D, H]."""
        spec = self._spec
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        query = (self.first_head * spec.head_dim, (self.first_head + self.num_heads) * spec.head_dim)
        kv = (self.first_kv_head * spec.head_dim, (self.first_kv_head + self.num_kv_heads) * spec.head_dim)
        if spec.family == "phi3":
            offsets = (0, query_size, query_size + kv_size)
            rows = [
                (first + offset, end + offset) for (first, end), offset in zip((query, kv, kv), offsets, strict=True)
            ]
            return self._rows(f"{at}.qkv_proj", query_size + 2 * kv_size, rows, has_bias=False)
        parts = [
            self._rows(f"{at}.{name}_proj", total, [rows], has_bias=spec.has_qkv_bias)
            for name, total, rows in (("q", query_size, query), ("k", kv_size, kv), ("v", kv_size, kv))
        ]
        return _stack(parts)

    def attention_out(self, at: str) -> Matrix:
        """Return the columns of this rank's heads [H, Hq D]; the bias is rank 0's, since sums are added up."""
        spec = self._spec
        columns = (self.first_head * spec.head_dim, (self.first_head + self.num_heads) * spec.head_dim)
        name = f"{at}.o_proj"
        return self._columns(name, spec.num_heads * spec.head_dim, columns, has_bias=spec.has_o_bias)

    def sinks(self, at: str) -> torch.Tensor | None:
        """Return the sinks of this rank's heads [Hq], fp32."""
        if not self._spec.has_sinks:
            return None
        sinks = self._checkpoint.tensor(f"{self._prefix}{at}.sinks", (self._spec.num_heads,))
        return sinks[self.first_head : self.first_head + self.num_heads].float()

    def gate_up(self, at: str) -> Matrix:
        """Return gate and up of this rank's part of the MLP [2 F / ranks, H]."""
        spec = self._spec
        total = spec.intermediate_size
        first, end = part_of(total, self._rank, self._size)
        if spec.family == "phi3":
            rows = [(first, end), (total + first, total + end)]
            return self._rows(f"{at}.gate_up_proj", 2 * total, rows, has_bias=False)
        parts = [
            self._rows(f"{at}.{name}_proj", total, [(first, end)], has_bias=spec.has_mlp_bias)
            for name in ("gate", "up")
        ]
        return _stack(parts)

    def down(self, at: str) -> Matrix:
        """Return the columns of this rank's part of the MLP [H, F / ranks]; the bias is rank 0's."""
        total = self._spec.intermediate_size
        columns = part_of(total, self._rank, self._size)
        return self._columns(f"{at}.down_proj", total, columns, has_bias=self._spec.has_mlp_bias)

    def router(self, layer: str) -> Matrix:
        """Return a mixture's router [E, H], the same on every rank."""
        spec = self._spec
        assert spec.experts is not None, "a mixture has experts"
        name = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}.get(spec.family, "mlp.gate")
        count = spec.experts.num_experts
        return self._rows(f"{layer}.{name}", count, [(0, count)], has_bias=spec.experts.has_bias)

    def expert(self, layer: str, expert: int) -> tuple[Matrix, Matrix]:
        """Return an expert's gate and up [2 F, H] and its down [H, F]."""
        spec = self._spec
        assert spec.experts is not None, "a mixture has experts"
        size, hidden = spec.experts.intermediate_size, spec.hidden_size
        if spec.family == "gpt_oss":
            return self._gpt_oss_expert(f"{layer}.mlp.experts", expert)
        if spec.family == "mixtral":
            at, names = f"{layer}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")
        else:
            at, names = f"{layer}.mlp.experts.{expert}", ("gate_proj", "up_proj", "down_proj")
        gate, up = (self._rows(f"{at}.{name}", size, [(0, size)], has_bias=False) for name in names[:2])
        down = self._checkpoint.tensor(f"{self._prefix}{at}.{names[2]}.weight", (hidden, size))
        return _stack([gate, up]), Matrix(weight=down)

    def _gpt_oss_expert(self, at: str, expert: int) -> tuple[Matrix, Matrix]:
        # All experts in one tensor, transposed, with gate and up in turn.
        spec = self._spec
        assert spec.experts is not None, "a mixture has experts"
        count, size, hidden = spec.experts.num_experts, spec.experts.intermediate_size, spec.hidden_size

        def of_expert(name: str, *shape: int) -> torch.Tensor:
            return self._checkpoint.tensor(f"{self._prefix}{at}.{name}", (count, *shape))[expert]

        rows = of_expert("gate_up_proj", hidden, 2 * size).t()
        bias = of_expert("gate_up_proj_bias", 2 * size)
        gate_up = Matrix(weight=torch.cat([rows[::2], rows[1::2]]), bias=torch.cat([bias[::2], bias[1::2]]))
        down = of_expert("down_proj", size, hidden).t()
        return gate_up, Matrix(weight=down, bias=of_expert("down_proj_bias", hidden))

    def _rows(self, name: str, total: int, rows: list[tuple[int, int]], *, has_bias: bool) -> Matrix:
        """Return ranges of rows of a matrix of `total` rows, one under the other."""
        weight = self._checkpoint.tensor(f"{self._prefix}{name}.weight", (total, self._spec.hidden_size))
        bias = self._checkpoint.tensor(f"{self._prefix}{name}.bias", (total,)) if has_bias else None
        return Matrix(
            weight=torch.cat([weight[first:end] for first, end in rows]),
            bias=None if bias is None else torch.cat([bias[first:end] for first, end in rows]),
        )

    def _columns(self, name: str, total: int, columns: tuple[int, int], *, has_bias: bool) -> Matrix:
        hidden = self._spec.hidden_size
        weight = self._checkpoint.tensor(f"{self._prefix}{name}.weight", (hidden, total))
        is_first = has_bias and self._rank == 0
        return Matrix(
            weight=weight[:, columns[0] : columns[1]],
            bias=self._checkpoint.tensor(f"{self._prefix}{name}.bias", (hidden,)) if is_first else None,
        )


def _stack(parts: list[Matrix]) -> Matrix:
    biases = [part.bias for part in parts if part.bias is not None]
    return Matrix(
        weight=torch.cat([part.weight for part in parts]),
        bias=torch.cat(biases) if biases else None,
    )
