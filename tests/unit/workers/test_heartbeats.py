"""Ranks that hang: found by silence, or by a step that does not end."""

import pytest

from pdserve.workers.gang.heartbeats import HANG_S, HEARTBEAT_S, PREDICTED_STEPS, SILENCE_S, AwakeTime, Heartbeats


def watch(
    beats: Heartbeats, now: float, until: float, *, beating: dict[int, int], predicted_s: float = 0.0
) -> str | None:
    """Look every HEARTBEAT_S; the ranks of `beating` beat with their numbers of steps. Return the first trouble."""
    while now < until:
        now += HEARTBEAT_S
        for rank, num_steps in beating.items():
            beats.beat(rank, num_steps, now)
        trouble = beats.trouble(now, predicted_s)
        if trouble is not None:
            return f"{now:.1f}: {trouble}"
    return None


def test_a_gang_at_rest_is_in_no_trouble_as_long_as_it_beats() -> None:
    beats = Heartbeats(3, now=0.0, num_steps=7)
    for second in range(1, 100):
        beats.beat(1, 7, float(second))
        beats.beat(2, 7, float(second))
        assert beats.trouble(second + 0.5, 0.0) is None


def test_a_silent_rank_is_named_within_two_seconds() -> None:
    beats = Heartbeats(3, now=0.0)
    assert watch(beats, 0.0, 1.0, beating={1: 0, 2: 0}) is None
    assert watch(beats, 1.0, 5.0, beating={1: 0}) == "2.6: rank 2 is silent for 1.6 s"
    assert SILENCE_S < 1.6 <= SILENCE_S + HEARTBEAT_S


def test_a_step_that_does_not_end_is_a_hang_of_the_ranks_that_are_late() -> None:
    beats = Heartbeats(4, now=0.0, num_steps=10)
    for step in range(3):
        beats.led(step * 0.05)
    late = {1: 13, 2: 12, 3: 13}
    # The third step began at 0.1.
    assert watch(beats, 0.0, 0.1 + HANG_S - HEARTBEAT_S, beating=late) is None
    found = watch(beats, 0.1 + HANG_S - HEARTBEAT_S, 5.0, beating=late)
    assert found is not None
    assert "step 13 has not ended on rank 2 after 1." in found
    assert watch(beats, 2.0, 5.0, beating={1: 13, 2: 13, 3: 13}) is None


def test_a_step_may_take_five_predicted_ones() -> None:
    beats = Heartbeats(2, now=0.0)
    beats.led(0.0)
    slow_s = 2 * HANG_S
    limit = PREDICTED_STEPS * slow_s
    assert watch(beats, 0.0, limit - HEARTBEAT_S, beating={1: 0}, predicted_s=slow_s) is None
    assert watch(beats, limit, limit + 2 * HEARTBEAT_S, beating={1: 0}, predicted_s=slow_s) is not None


def test_a_pause_of_all_is_nobodys_silence() -> None:
    # A suspended machine, say: whoever looks on first has not read yet what the others sent.
    beats = Heartbeats(2, now=0.0)
    for pause in range(20):
        now = 100.0 * pause
        beats.led(now)
        assert beats.trouble(now, 0.0) is None
        assert beats.trouble(now + HEARTBEAT_S, 0.0) is None
        beats.beat(1, pause + 1, now + 2 * HEARTBEAT_S)


def test_who_is_slow_to_look_still_finds_a_silent_rank() -> None:
    beats = Heartbeats(2, now=0.0)
    looks = [0.8 * number for number in range(1, 10)]
    found = next(now for now in looks if beats.trouble(now, 0.0) is not None)
    assert found <= 4.0


def test_awake_time_runs_with_the_clock_between_looks() -> None:
    awake = AwakeTime(10.0)
    assert awake.at(10.1) == pytest.approx(0.1)
    assert awake.looked(10.2) == pytest.approx(0.2)
    assert awake.at(10.3) == pytest.approx(0.3)
    assert awake.looked(99.0) == pytest.approx(0.6)


def test_every_step_is_forgotten_once_all_ranks_have_done_it() -> None:
    beats = Heartbeats(3, now=0.0)
    for step in range(1000):
        beats.led(step * 0.01)
        beats.beat(1, step + 1, step * 0.01)
        beats.beat(2, step, step * 0.01)
        assert len(beats._led) == 1
        assert beats.trouble(step * 0.01, 0.0) is None
