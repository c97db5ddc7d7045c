"""Live requests: delivery, orphans, reclaims."""

from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.workers.live_requests import LiveRequests
from support.engines import make_request

KEY = (RequestId("r"), 0)


def delta(index: int, tokens: tuple[int, ...], reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(request_id=KEY[0], attempt=0, index=index, token_ids=tokens, finish_reason=reason)


def make() -> LiveRequests:
    live = LiveRequests(reclaim_s=1.0, keep_s=6.0)
    assert live.add(make_request("r", [10], resume=[1, 2]), channel=7)
    return live


def test_deltas_go_to_their_channel_and_the_ending_forgets_the_request() -> None:
    live = make()
    assert live.deliver([delta(2, (5,))], 5.0) == {7: [delta(2, (5,))]}
    ending = delta(3, (6,), FinishReason.LENGTH)
    assert live.deliver([ending], 5.0) == {7: [ending]}
    assert len(live) == 0
    assert live.deliver([delta(4, (7,))], 5.0) == {}
    assert not live.drop(KEY)


def test_an_ending_lost_with_its_connection_can_be_reclaimed_for_a_while() -> None:
    live = make()
    live.deliver([delta(2, (5,), FinishReason.STOP)], 5.0)
    live.channel_closed(7, now=6.0)
    assert live.reclaim(KEY, channel=9, next_index=2) == [delta(2, (5,), FinishReason.STOP)]
    live.forget_ended(now=10.9)
    # The receiver knows the token, and takes the ending.
    assert live.reclaim(KEY, channel=9, next_index=3) == [delta(2, (5,), FinishReason.STOP)]
    live.forget_ended(now=11.0)
    assert live.reclaim(KEY, channel=9, next_index=3) is None
    assert live.reap(now=99.0) == []


def test_the_same_attempt_is_taken_once() -> None:
    live = make()
    assert not live.add(make_request("r", [10]), channel=8)
    assert live.add(make_request("r", [10], attempt=1), channel=8)


def test_a_reclaim_gets_what_it_missed_and_then_the_rest() -> None:
    live = make()
    live.deliver([delta(2, (5,)), delta(3, (6,))], 5.0)
    assert live.channel_closed(7, now=10.0) == 1
    assert live.deliver([delta(4, (7,))], 5.0) == {}
    assert live.reclaim(KEY, channel=9, next_index=3) == [delta(3, (6,)), delta(4, (7,))]
    assert live.deliver([delta(5, (8,))], 5.0) == {9: [delta(5, (8,))]}
    assert live.reap(now=20.0) == []


def test_an_ending_missed_while_orphaned_comes_with_the_reclaim() -> None:
    live = make()
    live.channel_closed(7, now=10.0)
    live.deliver([delta(2, (5,)), delta(3, (6,), FinishReason.STOP)], 5.0)
    assert live.reclaim(KEY, channel=9, next_index=2) == [delta(2, (5,)), delta(3, (6,), FinishReason.STOP)]
    assert len(live) == 0


def test_impossible_reclaims_find_nothing() -> None:
    live = make()
    for next_index in (-1, 0, 1, 4):
        assert live.reclaim(KEY, channel=9, next_index=next_index) is None
    assert live.reclaim((RequestId("other"), 0), channel=9, next_index=0) is None


def test_orphans_are_reaped_after_their_time_and_not_before() -> None:
    live = make()
    live.channel_closed(7, now=10.0)
    assert live.reap(now=10.9) == []
    assert live.reap(now=11.0) == [KEY]
    assert live.reclaim(KEY, channel=9, next_index=2) is None


def test_failing_all_ends_each_once_after_its_tokens() -> None:
    live = make()
    live.deliver([delta(2, (5,))], 5.0)
    outgoing = live.fail_all("boom", 5.0)
    (ending,) = outgoing[7]
    assert (ending.index, ending.finish_reason, ending.error) == (3, FinishReason.ERROR, "boom")
    assert len(live) == 0
