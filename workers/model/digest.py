"""A digest model: a stand-in whose text depends on every KV value it reads.

The KV of a token is a hash of (token, position, layer, key or value, head); the next token hashes all KV that attention
would read, through the block tables. A misplaced, stale or missing block therefore changes the text. It drives
scheduler, transfers and the HTTP path at microseconds a step, over real KV stores, one for each tensor-parallel rank.

A hash is held as three whole numbers from -127 to 127 beside 127 itself: fp32, fp16 and int8 rows hold them exactly,
so a text does not change when KV moves between workers of different dtypes.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.plan import Int32, Int64, StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.engine.sampler import philox_uniform
from pdserve.workers.kv.rows import decode_rows, encode_rows
from pdserve.workers.kv.store import KVStore

UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]

HEAD_DIM = 4


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
        kv_dtype: KVDtype = KVDtype.FLOAT32,
        tp_size: int = 1,
    ) -> None:
        """`kv_dtype` and `tp_size` say how a worker holds the KV; the text does not depend on them."""
        self.windows = windows
        self.layers_per_group = layers_per_group
        self.num_heads = num_heads
        self.vocab_size = vocab_size
        self.kv_dtype = kv_dtype
        self.tp_size = tp_size

    def kv(self, group: int, token_ids: Int32, positions: Int32 | Int64) -> Float32Array:
        """Return the KV of tokens in one group, [T, layers, 2, heads, HEAD_DIM]."""
        shape = (self.layers_per_group, 2, self.num_heads)
        salt = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) + np.uint64(1000 * group)
        with np.errstate(over="ignore"):
            seed = token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
            hashes = mix(mix(seed)[:, None, None, None] + salt[None] * np.uint64(0xD1B54A32D192ED03))
        shifts = np.arange(HEAD_DIM, dtype=np.uint64) * np.uint64(16)
        values = ((hashes[..., None] >> shifts) % np.uint64(255)).astype(np.float32) - np.float32(127)
        values[..., 0] = 127
        return values

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of its KV."""
        count = self.layers_per_group
        return KVLayout(
            model_digest=f"digest-{self.windows}-{count}-{self.num_heads}-{self.vocab_size}",
            kv_dtype=self.kv_dtype,
            block_size=block_size,
            num_kv_heads=self.num_heads,
            head_dim=HEAD_DIM,
            tp_size=self.tp_size,
            groups=tuple(
                GroupLayout(window=window, layers=tuple(range(group * count, (group + 1) * count)))
                for group, window in enumerate(self.windows)
            ),
        )

    def next_token(
        self, histories: list[Float32Array], request_seed: int, sample: int, index: int, *, is_greedy: bool
    ) -> int:
        """Return the token after the given KV: [tokens, layers, 2, heads, HEAD_DIM] per group, windows already cut."""
        state = np.zeros(1, np.uint64)
        with np.errstate(over="ignore"):
            for history in histories:
                bits = np.ascontiguousarray(history).reshape(-1).view(np.uint64)
                weights = np.arange(1, bits.size + 1, dtype=np.uint64)
                state = mix(state + (mix(bits) * weights).sum(keepdims=True))
        if not is_greedy:
            uniform = philox_uniform(np.uint64(request_seed), np.uint64(sample), np.uint64(index))
            state = mix(state ^ np.uint64(int(uniform * 2**53)))
        return int(state[0] % np.uint64(self.vocab_size))

    def generate(self, request: Request) -> list[int]:
        """Return the whole output of a request by the definition, without any engine. Ends by length only."""
        tokens = np.array(request.prompt_token_ids + request.resume_token_ids, np.int32)
        output = list(request.resume_token_ids)
        known = [self.kv(group, tokens, np.arange(len(tokens))) for group in range(len(self.windows))]
        while len(output) < request.sampling.max_tokens:
            histories = [
                kv[max(0, len(kv) - window) if window else 0 :] for kv, window in zip(known, self.windows, strict=True)
            ]
            token = self.next_token(
                histories,
                request.sampling.seed,
                request.sample,
                len(output),
                is_greedy=request.sampling.temperature == 0.0,
            )
            output.append(token)
            position = np.array([len(known[0])])
            known = [
                np.concatenate([kv, self.kv(group, np.array([token], np.int32), position)])
                for group, kv in enumerate(known)
            ]
        return output


class DigestRunner:
    """Runs plans of the digest model over paged KV."""

    def __init__(self, model: DigestModel, *, num_blocks: Sequence[int], block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._layout = model.layout(block_size)
        self.stores = tuple(
            KVStore(self._layout, num_blocks=num_blocks, device=torch.device("cpu"), rank=rank)
            for rank in range(model.tp_size)
        )
        self._groups = [group.layers for group in self._layout.groups]

    @property
    def store(self) -> KVStore:
        """The KV store of rank 0."""
        return self.stores[0]

    def bind_thread(self) -> None:
        """Nothing to set: this runner has no threads."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        for store in self.stores:
            store.copy_block(group, source, target)

    def settle(self, copies: Copies) -> None:
        """See ModelRunner: the ranks of this process made them already."""

    def execute(
        self,
        plan: StepPlan,
        on_layer: Callable[[int], None] | None = None,
        exported: Exported = (),
        copies: Copies = (),
    ) -> StepOutput:
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
                self._write(layer, blocks, offsets, values[:, place])
                if on_layer is not None:
                    on_layer(layer)
        tokens = [self._sample(plan, index, int(row)) for index, row in enumerate(plan.sample_rows)]
        return StepOutput(token_ids=np.array(tokens, np.int32))

    def _write(self, layer: int, blocks: Int32, offsets: Int32, values: Float32Array) -> None:
        """Write the KV of tokens [T, 2, heads, HEAD_DIM] to every rank that holds a head."""
        rows = encode_rows(torch.from_numpy(values), self._model.kv_dtype)
        held, places = torch.from_numpy(blocks).long(), torch.from_numpy(offsets).long()
        for store in self.stores:
            first, end = self._layout.heads_of(store.rank)
            store.layer(layer)[held, :, :, places] = rows[:, :, first:end]

    def _read(self, layer: int, blocks: Int32, offsets: Int64) -> Float32Array:
        """Return the KV of tokens [T, 2, heads, HEAD_DIM]; of ranks that hold the same head, each gives some tokens."""
        held, places = torch.from_numpy(blocks).long(), torch.from_numpy(offsets).long()
        num_copies = max(1, self._model.tp_size // self._layout.num_kv_heads)
        values = torch.empty((len(held), 2, self._layout.num_kv_heads, HEAD_DIM))
        for store in self.stores:
            first, end = self._layout.heads_of(store.rank)
            copy = store.rank % num_copies
            rows = store.layer(layer)[held[copy::num_copies], :, :, places[copy::num_copies]]
            values[copy::num_copies, :, first:end] = decode_rows(rows, HEAD_DIM)
        array: Float32Array = values.numpy()
        return array

    def _sample(self, plan: StepPlan, index: int, row: int) -> int:
        length = int(plan.positions[plan.row_starts[row + 1] - 1]) + 1
        histories = []
        for group, window in enumerate(self._model.windows):
            start = max(0, length - window) if window else 0
            places = np.arange(start, length)
            blocks, offsets = plan.block_tables[group][row, places // self._block_size], places % self._block_size
            layers = [self._read(layer, blocks, offsets) for layer in self._groups[group]]
            histories.append(np.stack(layers, axis=1))
        return self._model.next_token(
            histories,
            int(plan.sampling.seed[index]),
            int(plan.sampling.sample[index]),
            int(plan.sampling.position[index]),
            is_greedy=bool(plan.sampling.temperature[index] == 0.0),
        )
