"""A digest model: a stand-in whose text depends on every KV value it reads.

The KV of a token is a hash of (token, position, layer, key or value, head); the next token hashes all KV that attention
would read, through the block tables. A misplaced, stale or missing block therefore changes the text. It drives
scheduler, transfers and the HTTP path at microseconds a step, over a real KV store.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.plan import Int32, Int64, StepOutput, StepPlan
from pdserve.workers.engine.sampler import philox_uniform
from pdserve.workers.kv.store import KVStore

UInt64Array = NDArray[np.uint64]


def mix(values: UInt64Array) -> UInt64Array:
    """Return splitmix64's finalizer of each value (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: UInt64Array = values ^ (values >> np.uint64(31))
        return mixed


class DigestModel:
    """The pure function: KV of tokens, and the token that follows a history of KV."""

    def __init__(
        self,
        *,
        windows: tuple[int, ...] = (0, 24),
        layers_per_group: int = 2,
        num_heads: int = 2,
        vocab_size: int = 512,
    ) -> None:
        self.windows = windows
        self.layers_per_group = layers_per_group
        self.num_heads = num_heads
        self.vocab_size = vocab_size

    def kv(self, group: int, token_ids: Int32, positions: Int32 | Int64) -> UInt64Array:
        """Return the KV of tokens in one group, [T, layers, 2, heads]."""
        shape = (self.layers_per_group, 2, self.num_heads)
        salt = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) + np.uint64(1000 * group)
        with np.errstate(over="ignore"):
            seed = token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
            return mix(mix(seed)[:, None, None, None] + salt[None] * np.uint64(0xD1B54A32D192ED03))

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of its KV: each hash is a head of two 32-bit values."""
        count = self.layers_per_group
        return KVLayout(
            model_digest=f"digest-{self.windows}-{count}-{self.num_heads}-{self.vocab_size}",
            kv_dtype=KVDtype.FLOAT32,
            row_bytes=8,
            block_size=block_size,
            num_kv_heads=self.num_heads,
            head_dim=2,
            groups=tuple(
                GroupLayout(window=window, layers=tuple(range(group * count, (group + 1) * count)))
                for group, window in enumerate(self.windows)
            ),
        )

    def next_token(
        self, histories: list[UInt64Array], request_seed: int, sample: int, index: int, *, is_greedy: bool
    ) -> int:
        """Return the token after the given KV: one array [tokens, layers, 2, heads] per group, windows already cut."""
        state = np.zeros(1, np.uint64)
        with np.errstate(over="ignore"):
            for history in histories:
                weights = np.arange(1, history.size + 1, dtype=np.uint64)
                state = mix(state + (history.reshape(-1) * weights).sum(keepdims=True))
        if not is_greedy:
            uniform = philox_uniform(np.uint64(request_seed), np.uint64(sample), np.uint64(index))
            state = mix(state ^ np.uint64(int(uniform * 2**53)))
        return int(state[0] % np.uint64(self.vocab_size))

    def generate(self, request: Request) -> list[int]:
        """Return the whole output of a request by the definition, without any engine. Ends by length only."""
        tokens = np.array(request.prompt_token_ids + request.resume_token_ids, np.int32)
        output = list(request.resume_token_ids)
        while len(output) < request.sampling.max_tokens:
            positions = np.arange(len(tokens), dtype=np.int32)
            histories = []
            for group, window in enumerate(self.windows):
                start = max(0, len(tokens) - window) if window else 0
                histories.append(self.kv(group, tokens[start:], positions[start:]))
            token = self.next_token(
                histories,
                request.sampling.seed,
                request.sample,
                len(output),
                is_greedy=request.sampling.temperature == 0.0,
            )
            output.append(token)
            tokens = np.append(tokens, np.int32(token))
        return output


class DigestRunner:
    """Runs plans of the digest model over paged KV."""

    def __init__(self, model: DigestModel, *, num_blocks: Sequence[int], block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        layout = model.layout(block_size)
        self.store = KVStore(layout, num_blocks=num_blocks, device=torch.device("cpu"))
        # [N, 2, heads, block] hashes, one array per layer.
        self._layers = [self.store.layer(index).numpy().view(np.uint64)[..., 0] for index in range(layout.num_layers)]
        self._groups = [group.layers for group in layout.groups]

    def bind_thread(self) -> None:
        """Nothing to set: this runner has no threads."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        self.store.copy_block(group, source, target)

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """See ModelRunner.execute. There are no logits: rules and log probabilities are refused."""
        assert not plan.sampling.rules, "the digest model has no logits to change"
        assert plan.scored is None, "the digest model has no log probabilities"
        assert (plan.sampling.num_logprobs < 0).all(), "the digest model has no log probabilities"
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.row_starts))
        numbers, offsets = plan.positions // self._block_size, plan.positions % self._block_size
        for group, layers in enumerate(self._groups):
            blocks = plan.block_tables[group][rows, numbers]
            values = self._model.kv(group, plan.token_ids, plan.positions)
            for place, layer in enumerate(layers):
                self._layers[layer][blocks, :, :, offsets] = values[:, place]
                if on_layer is not None:
                    on_layer(layer)
        tokens = [self._sample(plan, index, int(row)) for index, row in enumerate(plan.sample_rows)]
        return StepOutput(token_ids=np.array(tokens, np.int32))

    def _sample(self, plan: StepPlan, index: int, row: int) -> int:
        length = int(plan.positions[plan.row_starts[row + 1] - 1]) + 1
        histories = []
        for group, window in enumerate(self._model.windows):
            start = max(0, length - window) if window else 0
            places = np.arange(start, length)
            blocks, offsets = plan.block_tables[group][row, places // self._block_size], places % self._block_size
            layers = [self._layers[layer][blocks, :, :, offsets] for layer in self._groups[group]]
            histories.append(np.stack(layers, axis=1))
        return self._model.next_token(
            histories,
            int(plan.sampling.seed[index]),
            int(plan.sampling.sample[index]),
            int(plan.sampling.position[index]),
            is_greedy=bool(plan.sampling.temperature[index] == 0.0),
        )
