"""BlockPool: references, generations, promises, groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.workers.engine.block_pool import BlockLists, BlockPool
from pdserve.workers.engine.plan import Int32


def each(pool: BlockPool, count: int) -> list[int]:
    return [count] * pool.num_groups


def take(pool: BlockPool, count: int) -> BlockLists:
    blocks = pool.allocate(each(pool, count))
    assert blocks is not None
    return blocks


def give_back(pool: BlockPool, blocks: BlockLists) -> None:
    for group, held in enumerate(blocks):
        pool.release(group, held)


def test_a_freed_block_has_a_new_generation() -> None:
    # I3
    pool = BlockPool([4, 4])
    blocks = take(pool, 1)
    before = pool.generation(1, blocks[1][0])
    pool.release(1, blocks[1])
    assert pool.generation(1, blocks[1][0]) == before + 1
    assert pool.generation(0, blocks[0][0]) == before


def test_a_pinned_block_is_free_only_after_its_last_reference() -> None:
    # I4
    pool = BlockPool([2])
    ((block,),) = take(pool, 1)
    pinned = np.array([block], np.int32)
    pool.pin(0, pinned)
    pool.release(0, [block])
    assert pool.num_free(0) == 1
    assert pool.pins(0)[block] == 1
    pool.unpin(0, pinned)
    assert pool.num_free(0) == 2


def test_releasing_twice_and_pinning_a_free_block_are_caught() -> None:
    pool = BlockPool([2])
    ((block,),) = take(pool, 1)
    pool.release(0, [block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0, [block])
    with pytest.raises(AssertionError, match="is free"):
        pool.pin(0, np.array([block], np.int32))


def test_what_is_not_free_in_every_group_is_not_given() -> None:
    pool = BlockPool([5, 5])
    blocks = take(pool, 3)
    pool.release(0, blocks[0])
    assert (pool.num_free(0), pool.num_free(1)) == (5, 2)
    assert pool.allocate(each(pool, 3)) is None
    assert pool.allocate(each(pool, 2)) is not None
    pool.validate()


def test_a_promise_keeps_blocks_from_everyone_until_it_is_redeemed() -> None:
    pool = BlockPool([8, 8], promised_share=0.5)
    assert pool.promise(each(pool, 3))
    assert (pool.num_free(0), pool.num_available(0)) == (8, 5)
    assert pool.allocate(each(pool, 6)) is None
    others = take(pool, 5)
    blocks = pool.redeem(each(pool, 3))
    assert [len(held) for held in blocks] == [3, 3]
    assert not set(blocks[0]) & set(others[0])
    assert pool.num_free(0) == pool.num_promised(0) == 0
    give_back(pool, blocks)
    give_back(pool, others)
    pool.validate()


def test_promises_are_capped_but_a_large_one_alone_is_not() -> None:
    pool = BlockPool([16], promised_share=0.25)
    assert pool.promise(each(pool, 10))
    assert not pool.promise(each(pool, 1))
    pool.cancel(each(pool, 10))
    assert pool.promise(each(pool, 2))
    assert pool.promise(each(pool, 2))
    assert not pool.promise(each(pool, 1))
    with pytest.raises(AssertionError, match="more promises"):
        pool.cancel(each(pool, 5))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=60))
def test_blocks_are_never_lost_or_doubled(actions: list[tuple[int, int]]) -> None:
    pool = BlockPool([8, 8], promised_share=1.0)
    held: list[BlockLists] = []
    pinned: list[Int32] = []
    promises: list[int] = []
    for action, count in actions:
        if action == 0:
            blocks = pool.allocate(each(pool, count))
            held += [] if blocks is None else [blocks]
        elif action == 1 and held:
            pinned.append(np.array(held[0][0], np.int32))
            pool.pin(0, pinned[-1])
        elif action == 2 and held:
            give_back(pool, held.pop())
        elif action == 3 and pool.promise(each(pool, count)):
            promises.append(count)
        elif action == 4 and promises:
            held.append(pool.redeem(each(pool, promises.pop())))
        pool.validate()
    for blocks in held:
        give_back(pool, blocks)
    for blocks_read in pinned:
        pool.unpin(0, blocks_read)
    for count in promises:
        pool.cancel(each(pool, count))
    assert pool.num_available(0) == 8
    pool.validate()
