"""What CUDA graphs need of a step, without a GPU: sizes, padding, and inputs that are overwritten in place."""

import numpy as np
import pytest
import torch

from pdserve.workers.attention.protocol import build_metadata
from pdserve.workers.engine.plan import ForwardPlan
from pdserve.workers.model.graphs import graph_sizes, is_decode, overwrite, pad_plan, padded_size

CPU = torch.device("cpu")


def make_decode(lengths: list[int], *, num_groups: int = 2) -> ForwardPlan:
    rows = len(lengths)
    table = np.arange(rows * 6, dtype=np.int32).reshape(rows, 6)
    behind_a_window = np.where(np.arange(6) < 2, -1, table).astype(np.int32)
    return ForwardPlan(
        token_ids=np.arange(100, 100 + rows, dtype=np.int32),
        positions=np.array(lengths, np.int32) - 1,
        row_starts=np.arange(rows + 1, dtype=np.int32),
        block_tables=(table, behind_a_window)[:num_groups],
    )


@pytest.mark.parametrize("max_rows", [1, 3, 8, 64, 100, 256])
def test_every_batch_has_a_size_that_wastes_little(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        size = padded_size(num_rows, sizes)
        assert size is not None
        assert num_rows <= size < max(2 * num_rows, num_rows + 32)
    assert padded_size(max_rows + 1, sizes) is None
    assert len(sizes) < 20


def test_only_one_token_of_each_row_is_a_decode() -> None:
    plan = make_decode([5, 40, 70])
    everyone = np.arange(3, dtype=np.int32)
    assert is_decode(plan, everyone)
    assert not is_decode(plan, everyone[:2]), "a row is a chunk of a prompt"
    chunk = ForwardPlan(
        token_ids=np.zeros(4, np.int32),
        positions=np.array([4, 39, 68, 69], np.int32),
        row_starts=np.array([0, 1, 2, 4], np.int32),
        block_tables=plan.block_tables,
    )
    assert not is_decode(chunk, np.array([0, 1, 3], np.int32))


def test_rows_that_pad_are_of_the_null_blocks_and_others_are_unchanged() -> None:
    plan = make_decode([5, 40, 70])
    padded = pad_plan(plan, 8, (90, 91), 10)
    assert padded.num_rows == padded.num_tokens == 8
    assert padded.token_ids[:3].tolist() == [100, 101, 102]
    assert padded.positions.tolist() == [4, 39, 69, 0, 0, 0, 0, 0]
    for table, plain, null in zip(padded.block_tables, plan.block_tables, (90, 91), strict=True):
        assert table.shape == (8, 10)
        assert (table[3:] == null).all()
        assert (table[:, 6:] == null).all()
        assert (table[:3, :6] == np.where(plain < 0, null, plain)).all()
    step = build_metadata(padded, (0, 32), 16)
    # What pads writes to the null block only.
    assert step.groups[0].token_blocks[3:].tolist() == [90] * 5
    assert step.groups[1].token_blocks[3:].tolist() == [91] * 5


def test_what_a_graph_reads_is_overwritten_where_it_lies() -> None:
    shapes = (0, 32)
    held = build_metadata(pad_plan(make_decode([1, 1]), 4, (90, 91), 10), shapes, 16).tensors(CPU)
    fresh = build_metadata(pad_plan(make_decode([5, 40, 70]), 4, (90, 91), 10), shapes, 16).tensors(CPU)
    places = [held.positions.data_ptr(), held.groups[1].block_table.data_ptr()]
    overwrite(held, fresh)
    assert places == [held.positions.data_ptr(), held.groups[1].block_table.data_ptr()]
    assert held.kv_lengths.tolist() == [5, 40, 70, 1]
    assert torch.equal(held.groups[0].block_table, fresh.groups[0].block_table)
    assert torch.equal(held.groups[1].token_blocks, fresh.groups[1].token_blocks)
