"""Which transport a link takes: in order, with rests."""

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.config import TransportKind
from pdserve.kvtransfer.transport_order import TransportOrder

SHM, TCP, NIXL = TransportKind.SHM, TransportKind.TCP, TransportKind.NIXL


def test_a_link_that_breaks_goes_on_over_the_next_transport_and_comes_back() -> None:
    # known_faults B063
    clock = ManualClock()
    order = TransportOrder((SHM, TCP), clock)
    assert order.choose() is SHM
    assert not order.broke(SHM)
    assert order.choose() is TCP
    clock.advance(2.1)
    assert order.choose() is SHM
    assert order.is_better(SHM, TCP)


def test_what_breaks_three_times_in_a_minute_rests_for_one() -> None:
    clock = ManualClock()
    order = TransportOrder((SHM, TCP), clock)
    demoted = []
    for _ in range(3):
        demoted.append(order.broke(SHM))
        clock.advance(2.1)
    assert demoted == [False, False, True]
    assert order.choose() is TCP
    clock.advance(58.0)
    assert order.choose() is SHM
    clock.advance(10.0)
    assert not order.broke(SHM)  # the earlier ones are forgotten


def test_what_never_opens_is_asked_less_and_less_often() -> None:
    clock = ManualClock()
    order = TransportOrder((NIXL, TCP), clock)
    for rest_s in (60.0, 120.0, 240.0):
        order.refused(NIXL)
        clock.advance(rest_s - 1)
        assert order.choose() is TCP
        clock.advance(1.1)
        assert order.choose() is NIXL
    order.opened(NIXL)
    order.refused(NIXL)
    clock.advance(60.1)
    assert order.choose() is NIXL


def test_if_all_rest_the_one_that_rests_least_is_taken() -> None:
    clock = ManualClock()
    order = TransportOrder((SHM, TCP), clock)
    order.refused(SHM)
    assert not order.are_all_resting
    order.broke(TCP)
    assert order.are_all_resting
    assert order.choose() is TCP
