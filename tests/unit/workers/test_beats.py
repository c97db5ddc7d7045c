"""Ranks that hang: found by silence, or by a step that does not end."""

from pdserve.workers.gang.beats import HANG_S, PREDICTED_STEPS, SILENCE_S, Beats


def test_a_gang_at_rest_is_in_no_trouble_as_long_as_it_beats() -> None:
    beats = Beats(3, now=0.0, num_steps=7)
    for second in range(1, 100):
        beats.beat(1, 7, float(second))
        beats.beat(2, 7, float(second))
        assert beats.trouble(second + 0.5, 0.0) is None


def test_a_silent_rank_is_named() -> None:
    beats = Beats(3, now=0.0)
    beats.beat(1, 0, 2.0)
    assert beats.trouble(SILENCE_S, 0.0) is None
    assert beats.trouble(2.0, 0.0) == "rank 2 is silent for 2.0 s"


def test_a_step_that_does_not_end_is_a_hang_of_the_ranks_that_are_late() -> None:
    beats = Beats(4, now=0.0, num_steps=10)
    for step in range(3):
        beats.led(step * 0.1)
    for rank, num_steps in ((1, 13), (2, 12), (3, 13)):
        beats.beat(rank, num_steps, 0.3 + HANG_S)
    # The third step began at 0.2.
    assert beats.trouble(0.2 + HANG_S, 0.0) is None
    assert beats.trouble(0.3 + HANG_S, 0.0) == f"step 13 has not ended on rank 2 after {0.1 + HANG_S:.1f} s"
    beats.beat(2, 13, 0.3 + HANG_S)
    assert beats.trouble(0.4 + HANG_S, 0.0) is None


def test_a_step_may_take_five_predicted_ones() -> None:
    beats = Beats(2, now=0.0)
    beats.led(0.0)
    slow_s = 2 * HANG_S
    beats.beat(1, 0, PREDICTED_STEPS * slow_s)
    assert beats.trouble(PREDICTED_STEPS * slow_s - 0.1, slow_s) is None
    assert beats.trouble(PREDICTED_STEPS * slow_s + 0.1, slow_s) is not None


def test_every_step_is_forgotten_once_all_ranks_have_done_it() -> None:
    beats = Beats(3, now=0.0)
    for step in range(1000):
        beats.led(step * 0.01)
        beats.beat(1, step + 1, step * 0.01)
        beats.beat(2, step, step * 0.01)
        assert len(beats._led) == 1
        assert beats.trouble(step * 0.01, 0.0) is None
