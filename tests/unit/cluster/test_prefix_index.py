"""Who holds which prefix: updates, gaps, snapshots, expectations, bounds."""

import random
from dataclasses import replace

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.prefix_hash import NAME_BYTES, split_names, unit_chain
from pdserve.cluster.base.route import PrefixChain
from pdserve.cluster.base.worker_info import WorkerInfo
from pdserve.cluster.control.prefix_index import EXPECTED_S, PrefixIndex
from support.workers import make_info

A, B = WorkerId("a"), WorkerId("b")
LIFE = Incarnation("life")
IDENTITY = make_info(A).prefix_identity


def names_of(num_units: int, first: int = 0) -> bytes:
    return unit_chain(IDENTITY, list(range(first, first + 16 * num_units)))


def info_of(worker: WorkerId, block_size: int = 16) -> WorkerInfo:
    return replace(make_info(worker), incarnation=LIFE, block_size=block_size)


def match(index: PrefixIndex, names: bytes) -> dict[WorkerId, int]:
    return index.match(chain(names))


def chain(names: bytes) -> list[PrefixChain]:
    return [PrefixChain(identity=IDENTITY, names=names)]


def make_index(most_names: int = 1000, block_size: int = 16) -> tuple[PrefixIndex, ManualClock]:
    clock = ManualClock()
    index = PrefixIndex(clock, most_names)
    for worker in (A, B):
        index.add_worker(info_of(worker, block_size))
    return index, clock


def make_update(
    worker: WorkerId, first_no: int, next_no: int, stored: bytes = b"", evicted: bytes = b"", *, snapshot: bool = False
) -> CacheUpdate:
    return CacheUpdate(
        worker_id=worker,
        incarnation=LIFE,
        first_no=first_no,
        next_no=next_no,
        is_snapshot=snapshot,
        stored=stored,
        evicted=evicted,
    )


def test_a_match_is_as_long_as_every_unit_from_the_first_is_held() -> None:
    index, _ = make_index()
    names = names_of(4)
    units = list(split_names(names))
    assert index.update(make_update(A, 0, 3, b"".join(units[:3]), snapshot=True))
    assert index.update(make_update(B, 0, 3, b"".join([units[0], *units[2:]]), snapshot=True))
    assert match(index, names) == {A: 48, B: 16}
    assert index.update(make_update(A, 3, 4, evicted=units[0]))
    assert match(index, names) == {B: 16}
    assert match(index, names_of(4, first=5)) == {}
    assert match(index, b"") == {}


def test_larger_blocks_are_named_at_their_last_unit() -> None:
    index, _ = make_index(block_size=32)
    names = names_of(5)
    units = list(split_names(names))
    index.update(make_update(A, 0, 2, units[1] + units[3], snapshot=True))
    assert match(index, names) == {A: 64}


def test_after_a_gap_nothing_is_taken_in_until_a_snapshot() -> None:
    index, _ = make_index()
    units = list(split_names(names_of(3)))
    assert not index.update(make_update(A, 0, 1, units[0])), "a new worker begins with a snapshot"
    assert index.update(make_update(A, 0, 1, units[0], snapshot=True))
    assert index.update(make_update(A, 1, 2, units[1]))
    assert not index.update(make_update(A, 3, 4, units[2]))
    assert not index.update(make_update(A, 4, 5, units[2])), "what follows the gap is no use either"
    assert index.num_gaps == 1
    assert match(index, b"".join(units)) == {A: 32}
    assert index.update(make_update(A, 0, 9, units[0], snapshot=True))
    assert index.update(make_update(A, 9, 9, units[1])), "the rest of a snapshot"
    assert match(index, b"".join(units)) == {A: 32}


def test_another_life_of_a_worker_holds_nothing_and_the_old_one_says_nothing() -> None:
    index, _ = make_index()
    names = names_of(2)
    index.update(make_update(A, 0, 2, names, snapshot=True))
    index.add_worker(info_of(A))
    assert match(index, names) == {A: 32}, "the same life"
    index.add_worker(replace(info_of(A), incarnation=Incarnation("next")))
    assert match(index, names) == {}
    assert index.update(make_update(A, 2, 3, names)), "a late message of the old life needs no answer"
    assert match(index, names) == {}
    assert len(index) == 0


def test_what_was_just_sent_counts_for_a_while() -> None:
    index, clock = make_index()
    names = names_of(3)
    index.expect(chain(names), (A,))
    index.expect(chain(names[: 2 * NAME_BYTES]), (B,))
    assert match(index, names) == {A: 48, B: 32}
    clock.advance(EXPECTED_S)
    assert match(index, names) == {A: 48, B: 32}
    clock.advance(EXPECTED_S)
    assert match(index, names) == {}


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    index, _ = make_index(most_names=4)
    old, new = names_of(3), names_of(3, first=100)
    index.update(make_update(A, 0, 3, old, snapshot=True))
    index.update(make_update(A, 3, 6, new))
    assert len(index) == 4
    assert index.num_forgotten == 2
    assert match(index, new) == {A: 48}
    assert match(index, old) == {}
    for first in range(10):
        index.expect(chain(names_of(3, first=first)), (A,))
    assert len(index._expected) < 4 + 3


def test_it_says_what_a_plain_table_says() -> None:
    rng = random.Random(3)
    index, _ = make_index()
    held: dict[WorkerId, set[bytes]] = {A: set(), B: set()}
    numbers = {A: 0, B: 0}
    chains = [list(split_names(names_of(6, first=first))) for first in range(4)]
    for _ in range(500):
        worker, drawn = rng.choice((A, B)), rng.choice(chains)
        stored = {name for name in drawn if rng.random() < 0.4}
        evicted = {name for name in held[worker] if rng.random() < 0.2} - stored
        is_snapshot = numbers[worker] == 0 or rng.random() < 0.05
        held[worker] = stored if is_snapshot else (held[worker] | stored) - evicted
        update = make_update(
            worker,
            numbers[worker],
            numbers[worker] + 1,
            b"".join(stored),
            b"" if is_snapshot else b"".join(evicted),
            snapshot=is_snapshot,
        )
        assert index.update(update)
        numbers[worker] += 1
        for units in chains:
            expected = {}
            for name, names in held.items():
                count = next((number for number, unit in enumerate(units) if unit not in names), len(units))
                if count:
                    expected[name] = 16 * count
            assert match(index, b"".join(units)) == expected
    index.remove_worker(A)
    index.remove_worker(B)
    assert len(index) == 0
