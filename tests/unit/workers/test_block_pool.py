"""BlockPool: references, generations, groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.workers.engine.block_pool import BlockPool


def test_a_freed_block_has_a_new_generation() -> None:
    pool = BlockPool(num_groups=2, num_blocks=4)
    (block,) = pool.allocate(1, 1)
    before = pool.generation(1, block)
    pool.release(1, [block])
    assert pool.generation(1, block) == before + 1
    assert pool.generation(0, block) == 0


def test_a_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(num_groups=1, num_blocks=2)
    (block,) = pool.allocate(0, 1)
    pool.retain(0, block)
    pool.release(0, [block])
    assert pool.num_free == 1
    pool.release(0, [block])
    assert pool.num_free == 2


def test_releasing_twice_and_retaining_a_free_block_are_caught() -> None:
    pool = BlockPool(num_groups=1, num_blocks=2)
    (block,) = pool.allocate(0, 1)
    pool.release(0, [block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0, [block])
    with pytest.raises(AssertionError, match="is free"):
        pool.retain(0, block)


def test_taking_more_than_is_free_is_caught() -> None:
    pool = BlockPool(num_groups=1, num_blocks=2)
    with pytest.raises(AssertionError, match="3 blocks wanted"):
        pool.allocate(0, 3)


def test_num_free_is_that_of_the_fullest_group() -> None:
    pool = BlockPool(num_groups=2, num_blocks=5)
    pool.allocate(1, 3)
    assert pool.num_free == 2


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 4)), max_size=60))
def test_blocks_are_never_lost_or_doubled(actions: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(num_groups=2, num_blocks=8)
    held: list[tuple[int, int]] = []
    for group, action, count in actions:
        if action == 0 and pool.num_free >= count:
            held += [(group, block) for block in pool.allocate(group, count)]
        elif action == 1 and held:
            pool.retain(*held[0])
            held.append(held[0])
        elif action == 2 and held:
            owner, block = held.pop()
            pool.release(owner, [block])
        pool.validate()
    for owner, block in held:
        pool.release(owner, [block])
    assert pool.num_free == 8
