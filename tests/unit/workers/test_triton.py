"""Triton's kernels in its interpreter, on a CPU: right, and the same bits in any batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.attention.choice import AttentionShape, find_fault
from pdserve.workers.attention.protocol import AttentionParameters, build_metadata
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.attention.triton_paged import TritonAttention
from pdserve.workers.kv.rows import encode_rows
from pdserve.workers.model.triton_linear import TiledProduct
from support.attention import definition, make_case, make_plan

CPU = torch.device("cpu")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=3),
    st.sampled_from((16, 32, 48)),
    st.sampled_from(((4, 1, 32), (6, 2, 18), (3, 3, 64), (8, 2, 7))),
    st.sampled_from((0, 1, 5, 33)),
    st.integers(0, 1000),
    st.sampled_from((0.0, 1.5)),
    st.booleans(),
)
def test_attention_is_the_definition(
    rows: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    window: int,
    seed: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    heads, kv_heads, size = shape
    query, kv, step = make_case(
        rows, block_size=block_size, heads=heads, kv_heads=kv_heads, size=size, window=window, seed=seed
    )
    sinks = torch.linspace(-2, 3, heads) if has_sinks else None
    parameters = AttentionParameters(group=0, scale=size**-0.5, softcap=softcap, sinks=sinks)
    found = TritonAttention().attend(query, kv, step, parameters)
    assert (found.double() - definition(query, kv, step, parameters)).abs().max() < 2e-5


@pytest.mark.parametrize("kv_dtype", [KVDtype.BFLOAT16, KVDtype.FLOAT16, KVDtype.FLOAT8])
def test_attention_reads_kv_of_other_dtypes(kv_dtype: KVDtype) -> None:
    query, kv, step = make_case([(40, 3), (0, 9)], block_size=16, heads=4, kv_heads=2, size=32, window=0, seed=3)
    held = encode_rows(kv, kv_dtype)
    parameters = AttentionParameters(group=0, scale=0.2)
    found = TritonAttention().attend(query, held, step, parameters)
    expected = TorchAttention().attend(query, held.float(), step, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 40])
def test_a_query_has_the_same_bits_in_any_chunk_and_batch(window: int) -> None:
    generator = torch.Generator().manual_seed(3)
    length, heads, kv_heads, size, block_size = 70, 4, 2, 24, 16
    query = torch.randn(length, heads, size, generator=generator)
    num_blocks = -(-length // block_size)
    kv = torch.randn(num_blocks * 3, 2, kv_heads, block_size, size, generator=generator)
    table = np.arange(num_blocks * 3, dtype=np.int32).reshape(3, num_blocks)[::-1].copy()
    parameters = AttentionParameters(group=0, scale=0.2)
    results = []
    for chunk, others in ((70, 0), (1, 0), (13, 2), (8, 1)):
        parts = []
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            plan = make_plan([(5, 3)] * others + [(first, count)], table[2 - others :])
            batch = torch.cat([torch.randn(3 * others, heads, size), query[first : first + count]])
            step = build_metadata(plan, (window,), block_size)
            parts.append(TritonAttention().attend(batch, kv, step, parameters)[3 * others :])
        results.append(torch.cat(parts))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (130, 90), (7, 200)])
def test_the_tiled_product_is_right_and_a_row_has_the_same_bits_in_any_batch(
    out_features: int, in_features: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, in_features), torch.randn(37, in_features)
    bias = torch.randn(out_features) if has_bias else None
    product = TiledProduct(weight, bias)
    whole = product(x)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 20), slice(36, 37)):
        assert torch.equal(product(x[rows]), whole[rows])
    assert product(x[:0]).shape == (0, out_features)


def test_a_backend_that_is_wrong_is_found_by_the_self_test() -> None:
    shape = AttentionShape(
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=16,
        kv_dtype=KVDtype.BFLOAT16,
        windows=(0, 24),
        softcap=2.0,
        has_sinks=True,
    )
    assert find_fault(TritonAttention(), CPU, shape) is None

    class Blind(TritonAttention):
        def attend(self, query, kv, step, parameters):  # type: ignore[no-untyped-def]
            blind = AttentionParameters(group=parameters.group, scale=parameters.scale)
            return super().attend(query, kv, step, blind)

    assert "its self-test is off by" in str(find_fault(Blind(), CPU, shape))
