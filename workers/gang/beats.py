"""Who of a gang hangs: the steps that rank 0 has led, and what the beats of the other ranks say. Pure; no clock inside.

A rank that is gone is noticed by its channel. One that lives and does not go on is found here: no beat for
`SILENCE_S`, or a step that it has not finished after max(`HANG_S`, 5 predicted steps).
"""

from collections import deque

BEAT_S = 0.2
SILENCE_S = 1.5
"""Without a beat. With the interval of beats, and of the look at them, a frozen process is found within two seconds."""
HANG_S = 1.5
"""For the same reason: a step longer than this is a hang, unless five predicted ones take longer."""
PREDICTED_STEPS = 5.0


class Beats:
    """What rank 0 knows of the others' progress."""

    def __init__(self, num_ranks: int, now: float, num_steps: int = 0) -> None:
        """All ranks have just been heard of, and have finished `num_steps`."""
        self._led: deque[float] = deque()
        self._num_led = num_steps
        self._heard = dict.fromkeys(range(1, num_ranks), now)
        self._num_steps = dict.fromkeys(range(1, num_ranks), num_steps)

    def led(self, now: float) -> None:
        """Rank 0 begins a step; also from another thread than the other calls, before the step is sent."""
        # Counted first: what is counted and not yet noted looks like done, which the next look corrects.
        self._num_led += 1
        self._led.append(now)

    def beat(self, rank: int, num_steps: int, now: float) -> None:
        """A rank has finished so many steps."""
        self._heard[rank] = now
        self._num_steps[rank] = num_steps
        num_done = min(self._num_steps.values())
        while self._num_led - len(self._led) < num_done:
            self._led.popleft()

    def trouble(self, now: float, predicted_s: float) -> str | None:
        """Return what is wrong: a rank that is silent, or ranks that do not finish a step; None if nothing is."""
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_S:
                return f"rank {rank} is silent for {now - heard:.1f} s"
        if self._led:
            waited_s = now - self._led[0]
            if waited_s > max(HANG_S, PREDICTED_STEPS * predicted_s):
                step_no = self._num_led - len(self._led) + 1
                late = [str(rank) for rank, num_steps in self._num_steps.items() if num_steps < step_no]
                return f"step {step_no} has not ended on rank {' and '.join(late)} after {waited_s:.1f} s"
        return None
