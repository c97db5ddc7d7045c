"""Attention backends against the plain definition, and the numba backend's exactness rules."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.workers.attention.numba_cpu import NumbaAttention
from pdserve.workers.attention.protocol import QUERY_TILE, AttentionParameters, build_metadata
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.kv.rows import dequantize_rows, quantize_rows
from support.attention import definition, make_case, make_plan


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=4),
    st.sampled_from((16, 32, 48)),
    st.sampled_from(((4, 1, 32), (6, 2, 18), (3, 3, 64), (4, 4, 7))),
    st.sampled_from((0, 1, 5, 33, 64)),
    st.integers(0, 1000),
    st.sampled_from((0.0, 1.5)),
    st.booleans(),
)
def test_both_backends_are_the_definition(
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
    parameters = AttentionParameters(
        group=0,
        scale=size**-0.5,
        softcap=softcap,
        sinks=torch.linspace(-2, 3, heads) if has_sinks else None,
    )
    rows8 = quantize_rows(kv)
    for held, values in (
        (kv, kv),
        (kv.half(), kv.half().float()),
        (rows8, dequantize_rows(rows8, size)),
    ):
        expected = definition(query, values, step, parameters)
        for backend in (NumbaAttention(), TorchAttention()):
            found = backend.attend(query, held, step, parameters)
            assert (found.double() - expected).abs().max() < 2e-5, type(backend).__name__


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (3, 1), (8, 2), (7, 1)])
def test_a_query_has_the_same_bits_in_any_chunk_batch_and_block_size(window: int, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    length, size = 150, 24
    query = torch.randn(length, heads, size, generator=generator)
    history = torch.randn(2, kv_heads, length + 42, size, generator=generator)
    results = []
    for block_size, chunk, others in ((16, 1, 0), (16, 150, 0), (32, 37, 2), (64, 64, 3), (16, 8, 1)):
        num_blocks = -(-length // block_size)
        kv = torch.full((num_blocks * (others + 1), 2, kv_heads, block_size, size), float("nan"))
        table = np.arange(num_blocks * (others + 1), dtype=np.int32)[::-1].reshape(others + 1, num_blocks).copy()
        for row in range(others + 1):
            for block in range(num_blocks):
                piece = history[:, :, block * block_size : (block + 1) * block_size]
                kv[table[row, block], :, :, : piece.shape[2]] = piece
        parts = []
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            rows = [(5 * number, 3) for number in range(others)] + [(first, count)]
            plan = make_plan(rows, table)
            batch = torch.cat([torch.randn(3 * others, heads, size), query[first : first + count]])
            step = build_metadata(plan, (window,), block_size)
            parts.append(
                NumbaAttention().attend(batch, kv, step, AttentionParameters(group=0, scale=0.2))[3 * others :]
            )
        results.append(torch.cat(parts))
    for result in results[1:]:
        assert torch.equal(result, results[0])
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [0, 3])
def test_a_value_that_is_not_finite_reaches_only_the_queries_that_see_it(
    is_int8: bool, bad: float, window: int
) -> None:
    query, kv, step = make_case([(0, 8)], block_size=16, heads=4, kv_heads=1, size=16, window=window, seed=0)
    block = int(step.groups[0].block_table[0, 0])
    kv[block, 1, 0, 4] = bad
    found = NumbaAttention().attend(
        query, quantize_rows(kv) if is_int8 else kv, step, AttentionParameters(group=0, scale=0.25)
    )
    sees = [token >= 4 and (window == 0 or token < 4 + window) for token in range(8)]
    assert (~torch.isfinite(found)).any(1).tolist() == sees


def test_work_items_cover_every_token_once_in_tiles_of_one_row() -> None:
    plan = make_plan([(0, 1), (10, 2 * QUERY_TILE + 3), (5, QUERY_TILE)], np.zeros((3, 4), np.int32))
    step = build_metadata(plan, (0,), 16)
    covered: list[int] = []
    for start, end in zip(step.item_starts, step.item_ends, strict=True):
        covered += range(start, end)
    assert covered == list(range(plan.num_tokens))
    for row, start, end in zip(step.item_rows, step.item_starts, step.item_ends, strict=True):
        assert 0 < end - start <= QUERY_TILE
        assert step.row_starts[row] <= start < end <= step.row_starts[row + 1]
