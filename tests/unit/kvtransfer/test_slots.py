"""Credits: a slot changes hands only by its header and its credit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.slots import LandingSlots, SlotLedger, SlotPool
from support.chunks import make_header


def send(ledger: SlotLedger, now: float = 0.0) -> Chunk:
    slot = ledger.take()
    assert slot is not None
    chunk = make_header(ledger.next_seq(), slot)
    ledger.sent(chunk, now)
    return chunk


def test_a_busy_link_borrows_and_an_idle_one_gives_back() -> None:
    pool = SlotPool(6)
    ledger = SlotLedger(pool, base=2, most=4)
    sent = [send(ledger) for _ in range(4)]
    assert ledger.take() is None
    assert (ledger.num_slots, pool.num_lent) == (4, 4)
    for chunk in sent:
        assert ledger.credited(chunk.seq, chunk.slot) == chunk
        assert not ledger.give_back_idle() or chunk is sent[-1]
        ledger.validate()
    assert (ledger.num_slots, pool.num_lent) == (2, 2)


def test_a_link_for_which_no_slots_are_left_is_refused() -> None:
    pool = SlotPool(3)
    first = SlotLedger(pool, base=2, most=4)
    with pytest.raises(ProtocolError, match="no slots left"):
        SlotLedger(pool, base=2, most=4)
    assert [first.take() is not None for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(("seq", "slot"), [(0, 1), (1, 0), (99, 0), (-1, 0)])
def test_a_credit_that_was_never_earned_is_refused(seq: int, slot: int) -> None:
    # I2
    ledger = SlotLedger(SlotPool(4), base=2, most=2)
    chunk = send(ledger)
    assert (chunk.seq, chunk.slot) == (0, 0)
    with pytest.raises(ProtocolError, match="not outstanding"):
        ledger.credited(seq, slot)
    ledger.credited(0, 0)
    with pytest.raises(ProtocolError, match="not outstanding"):
        ledger.credited(0, 0)


def test_a_refused_chunk_keeps_its_slot_for_the_resend() -> None:
    ledger = SlotLedger(SlotPool(4), base=1, most=1)
    chunk = send(ledger, 1.0)
    assert ledger.oldest_time == 1.0
    assert ledger.refused(chunk.seq, chunk.slot) == chunk
    assert ledger.take() is None
    assert ledger.oldest_time is None
    ledger.sent(make_header(ledger.next_seq(), chunk.slot), 2.0)
    ledger.credited(1, chunk.slot)
    ledger.validate()


def test_a_closed_link_leaves_no_slot_lent() -> None:
    # I16
    pool = SlotPool(8)
    ledger = SlotLedger(pool, base=2, most=8)
    for _ in range(5):
        send(ledger)
    ledger.close()
    assert pool.num_lent == 0


@given(st.lists(st.integers(0, 4), max_size=80))
def test_slots_always_add_up(actions: list[int]) -> None:
    pool = SlotPool(5)
    ledger = SlotLedger(pool, base=2, most=4)
    held: list[int] = []
    sent: list[Chunk] = []
    for action in actions:
        if action == 0:
            slot = ledger.take()
            held += [] if slot is None else [slot]
        elif action == 1 and held:
            chunk = make_header(ledger.next_seq(), held.pop())
            ledger.sent(chunk, 0.0)
            sent.append(chunk)
        elif action == 2 and sent:
            chunk = sent.pop(0)
            ledger.credited(chunk.seq, chunk.slot)
        elif action == 3 and sent:
            chunk = sent.pop(0)
            held.append(ledger.refused(chunk.seq, chunk.slot).slot)
        elif action == 4:
            ledger.give_back_idle()
        ledger.validate()
    assert pool.num_lent == ledger.num_slots


def test_the_sink_sees_a_slot_that_was_not_credited_and_a_chunk_that_does_not_fit() -> None:
    # I2, I17
    slots = LandingSlots(link_no=1, stream_no=0, source=Incarnation("p"), num_slots=2, slot_bytes=8)
    slots.occupy(make_header(0, 0))
    for wrong in (
        make_header(1, 0),
        make_header(1, 2),
        make_header(1, -1),
        make_header(1, 1, num_bytes=9),
        make_header(1, 1, num_bytes=0),
    ):
        with pytest.raises(ProtocolError):
            slots.occupy(wrong)
    slots.vacate(0)
    slots.occupy(make_header(1, 0))
    assert len(slots) == 1


def test_the_sink_sees_a_gap_a_repetition_another_link_and_another_sources_transfer() -> None:
    # I2, I3
    slots = LandingSlots(link_no=1, stream_no=0, source=Incarnation("p"), num_slots=4, slot_bytes=8)
    slots.occupy(make_header(0, 0, transfer=1))
    cargo = make_header(1, 1, transfer=1).cargo
    assert cargo is not None
    foreign = replace(cargo, transfer=replace(cargo.transfer, source=Incarnation("another")))
    for wrong in (
        make_header(2, 1),
        make_header(0, 1),
        make_header(1, 1, link_no=2),
        replace(make_header(1, 1), stream_no=1),
        replace(make_header(1, 1), cargo=foreign),
    ):
        with pytest.raises(ProtocolError):
            slots.occupy(wrong)
    slots.occupy(make_header(1, 1, transfer=1))
