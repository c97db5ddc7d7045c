"""The fused numba kernels against plain torch, and their row invariance."""

import numpy as np
import pytest
import torch

from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.attention.protocol import GroupMetadata, StepMetadata
from pdserve.workers.kv.row_kernels import decode_halves, encode_halves
from pdserve.workers.kv.rows import dequantize_rows, quantize_rows
from pdserve.workers.model.families import Activation, Router
from pdserve.workers.model.layers import group_by_expert
from pdserve.workers.model.numba_ops import NumbaOps
from pdserve.workers.model.ops import Ops, QKVParameters
from pdserve.workers.model.scalar_math import exp32
from pdserve.workers.model.torch_ops import TorchOps

NUMBA, TORCH = NumbaOps(), TorchOps()
EPS = 1e-6


@pytest.mark.parametrize("size", [90, 96, 640])
def test_norms_equal_torch_and_do_not_depend_on_the_batch(size: int) -> None:
    x, weight = torch.randn(9, size), torch.randn(size)
    found = NUMBA.norm(x, weight, EPS)
    torch.testing.assert_close(found, TORCH.norm(x, weight, EPS), rtol=2e-6, atol=2e-6)
    for row in range(9):
        assert torch.equal(NUMBA.norm(x[row : row + 1], weight, EPS)[0], found[row])


@pytest.mark.parametrize("has_post", [False, True])
def test_add_norm_equals_torch_and_changes_x_in_place(has_post: bool) -> None:
    x, delta, weight = torch.randn(5, 90), torch.randn(5, 90), torch.randn(90)
    post = torch.randn(90) if has_post else None
    ours, theirs = x.clone(), x.clone()
    found = NUMBA.add_norm(ours, delta, post, weight, EPS)
    torch.testing.assert_close(found, TORCH.add_norm(theirs, delta, post, weight, EPS), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    alone = x[3:4].clone()
    assert torch.equal(NUMBA.add_norm(alone, delta[3:4], post, weight, EPS)[0], found[3])


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("size", [75, 128])
def test_activations_equal_torch(activation: Activation, size: int) -> None:
    gate_up = torch.randn(7, 2 * size) * 6
    gate_up[0, 0], gate_up[0, 1] = 200.0, -200.0
    found = NUMBA.activate(gate_up, activation)
    torch.testing.assert_close(found, TORCH.activate(gate_up, activation), rtol=2e-6, atol=2e-6)
    assert torch.equal(NUMBA.activate(gate_up[4:5], activation)[0], found[4])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("size", [18, 64])
def test_store_qkv_equals_torch_and_writes_only_its_slots(has_norm: bool, size: int) -> None:
    heads, kv_heads, tokens = 4, 2, 6
    # Of the larger heads, only a part is rotated.
    angles = torch.rand(64, size // 2 if size < 64 else size // 4)
    cos, sin = angles.cos(), angles.sin()
    parameters = QKVParameters(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        group=0,
        query_norm=torch.randn(size) if has_norm else None,
        key_norm=torch.randn(size) if has_norm else None,
        cos=cos,
        sin=sin,
        eps=EPS,
    )
    place = GroupMetadata(
        block_table=np.zeros((1, 4), np.int32),
        token_blocks=np.array([3, 3, 0, 1, 1, 2], np.int32),
        token_offsets=np.array([0, 15, 7, 1, 2, 9], np.int32),
        window=0,
    )
    none = np.zeros(0, np.int32)
    positions = np.array([0, 15, 23, 40, 41, 63], np.int32)
    step = StepMetadata(
        positions=positions, row_starts=none, item_rows=none, item_starts=none, item_ends=none, groups=(place,)
    )
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
    ours16, theirs16 = (torch.full((4, 2, kv_heads, 16, size), 7, dtype=torch.float16) for _ in range(2))
    found, expected = (ops.store_qkv(qkv, parameters, kv, step) for ops, kv in ((NUMBA, ours16), (TORCH, theirs16)))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    # The keys were rotated in another order of additions: a value between two halves may go either way.
    torch.testing.assert_close(ours16, theirs16, rtol=1e-3, atol=1e-6)
    assert torch.equal(ours16[:, 1], theirs16[:, 1])
    ours8, theirs8 = (
        torch.full((4, 2, kv_heads, 16, KVDtype.INT8.row_bytes(size)), 7, dtype=torch.int8) for _ in range(2)
    )
    NUMBA.store_qkv(qkv, parameters, ours8, step)
    TORCH.store_qkv(qkv, parameters, theirs8, step)
    ours, theirs = (torch.full((4, 2, kv_heads, 16, size), 7.0) for _ in range(2))
    query = NUMBA.store_qkv(qkv, parameters, ours, step)
    torch.testing.assert_close(query, TORCH.store_qkv(qkv, parameters, theirs, step), rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)
    assert int((ours != 7.0).any(-1).sum()) == tokens * 2 * kv_heads
    assert int((ours8 != 7).any(-1).sum()) == tokens * 2 * kv_heads
    is_written = (ours != 7.0).any(-1)
    for rows in (ours8, theirs8):
        held = dequantize_rows(rows, size)[is_written]
        step_sizes = ours[is_written].abs().amax(-1, keepdim=True) / 127
        assert ((held - ours[is_written]).abs() <= 0.501 * step_sizes).all()


@pytest.mark.parametrize("ops", [NUMBA, TORCH])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int8_rows_do_not_hide_what_is_not_finite(ops: Ops, bad: float) -> None:
    size = 18
    angles = torch.rand(4, size // 2)
    cos, sin = angles.cos(), angles.sin()
    parameters = QKVParameters(
        num_heads=1, num_kv_heads=1, head_dim=size, group=0, query_norm=None, key_norm=None, cos=cos, sin=sin, eps=EPS
    )
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    place = GroupMetadata(block_table=one[None], token_blocks=one, token_offsets=one, window=0)
    step = StepMetadata(
        positions=one, row_starts=none, item_rows=none, item_starts=none, item_ends=none, groups=(place,)
    )
    qkv = torch.randn(1, 3 * size)
    qkv[0, [size + 3, 2 * size + 3]] = bad
    kv = torch.zeros((1, 2, 1, 16, KVDtype.INT8.row_bytes(size)), dtype=torch.int8)
    ops.store_qkv(qkv, parameters, kv, step)
    assert not torch.isfinite(dequantize_rows(kv, size)[0, :, 0, 0]).any()


def test_a_row_of_zeros_is_held_exactly() -> None:
    assert torch.equal(dequantize_rows(quantize_rows(torch.zeros(2, 18)), 18), torch.zeros(2, 18))


def test_exp_is_within_two_units_of_the_last_place() -> None:
    values = np.linspace(-86, 87, 20001).astype(np.float32)
    found = np.array([exp32(value) for value in values])
    expected = np.exp(values.astype(np.float64))
    assert np.abs(found / expected - 1).max() < 3e-7
    assert exp32(np.float32(-1e30)) < 1e-37
    assert exp32(np.float32(0.0)) == 1.0


def test_halves_are_those_of_torch() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    bits = np.zeros(2**16, np.uint32)
    values = bits.view(np.float32)
    decode_halves(every.numpy(), bits, values)
    expected = every.view(torch.float16).float()
    expected[~expected.isfinite()] = float("nan")
    torch.testing.assert_close(torch.from_numpy(values.copy()), expected, rtol=0, atol=0, equal_nan=True)
    # Between each two neighbours, at the middle and beside it; very small and very large ones.
    finite = every.view(torch.float16).float()
    finite = finite[finite.isfinite()].sort().values.unique()
    middles = (finite[1:].double() + finite[:-1].double()) / 2
    cases = torch.cat(
        [
            finite,
            middles.float(),
            torch.nextafter(middles.float(), torch.tensor(float("inf"))),
            torch.nextafter(middles.float(), torch.tensor(float("-inf"))),
            torch.tensor([65519.99, 65520.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1e-30, -0.0]),
        ]
    )
    halves = np.zeros(len(cases), np.uint16)
    given = cases.numpy().copy()
    encode_halves(given, given.view(np.uint32), halves)
    found = torch.from_numpy(halves).view(torch.float16)
    torch.testing.assert_close(found, cases.half(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", list(Router))
def test_routing_equals_torch_breaks_ties_by_number_and_does_not_depend_on_the_batch(kind: Router) -> None:
    logits = torch.randn(9, 8)
    logits[3, 2:7] = 1.5
    weights, chosen = NUMBA.route(logits, 3, kind)
    expected_weights, expected = TORCH.route(logits, 3, kind)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-7)
    for row in range(9):
        alone = NUMBA.route(logits[row : row + 1], 3, kind)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], chosen[row])


def test_what_experts_say_is_added_to_their_tokens() -> None:
    part, weights, tokens = torch.randn(3, 10), torch.rand(3), torch.tensor([4, 0, 2])
    ours, theirs = torch.ones(5, 10), torch.ones(5, 10)
    NUMBA.add_weighted(ours, part, weights, tokens)
    TORCH.add_weighted(theirs, part, weights, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[[1, 3]], torch.ones(2, 10))


def test_tokens_are_grouped_by_expert_in_order() -> None:
    chosen = torch.tensor([[3, 0], [0, 2], [2, 3]])
    groups = [(number, tokens.tolist(), places.tolist()) for number, tokens, places in group_by_expert(chosen)]
    assert groups == [(0, [0, 1], [1, 0]), (2, [1, 2], [1, 0]), (3, [0, 2], [0, 1])]
    assert group_by_expert(chosen[:0]) == []
