"""Finds hanging ranks, from the steps that rank 0 has sent and the heartbeats of the others. Pure; no clock inside.

A rank that is gone is noticed by its channel. One that lives and does not go on is found here: no beat for
`SILENCE_S`, or a step that it has not finished after max(`HANG_S`, 5 predicted steps).
"""

from collections import deque

HEARTBEAT_S = 0.2
SILENCE_S = 1.5
"""Without a beat. With the interval of beats, and of the look at them, a frozen process is found within two seconds."""
HANG_S = 1.5
"""For the same reason: a step longer than this is a hang, unless five predicted ones take longer."""
PREDICTED_STEPS = 5.0
LONGEST_LOOK_S = 2 * HEARTBEAT_S
"""What at most counts of the time between two looks."""


class AwakeTime:
    """Time during which a watcher was running: of a pause of its own, a suspended machine say, little counts.

    Without this, whoever wakes up finds all others silent, whose heartbeats have not been read yet.
    """

    def __init__(self, now: float) -> None:
        # In one attribute: another thread may ask.
        self._last_look = now, 0.0

    def looked(self, now: float) -> float:
        """The watcher looks; return the awake time."""
        awake = self.at(now)
        self._last_look = now, awake
        return awake

    def at(self, now: float) -> float:
        """Return the awake time of a moment since the last look."""
        look, awake = self._last_look
        return awake + min(now - look, LONGEST_LOOK_S)


class Heartbeats:
    """What rank 0 knows of the others' progress."""

    def __init__(self, num_ranks: int, now: float, num_steps: int = 0) -> None:
        """All ranks have just been heard of, and have finished `num_steps`."""
        self._awake = AwakeTime(now)
        self._led: deque[float] = deque()
        self._num_led = num_steps
        self._heard = dict.fromkeys(range(1, num_ranks), 0.0)
        self._num_steps = dict.fromkeys(range(1, num_ranks), num_steps)

    def led(self, now: float) -> None:
        """Rank 0 begins a step; also from another thread than the other calls, before the step is sent."""
        # Between the two lines the step counts as done, which the next look corrects.
        self._num_led += 1
        self._led.append(self._awake.at(now))

    def beat(self, rank: int, num_steps: int, now: float) -> None:
        """A rank has finished so many steps."""
        self._heard[rank] = self._awake.at(now)
        self._num_steps[rank] = num_steps
        num_done = min(self._num_steps.values())
        while self._num_led - len(self._led) < num_done:
            self._led.popleft()

    def trouble(self, now: float, predicted_s: float) -> str | None:
        """Look: return what is wrong, a rank that is silent, or ranks that do not finish a step; None if nothing is."""
        awake = self._awake.looked(now)
        for rank, heard in self._heard.items():
            if awake - heard > SILENCE_S:
                return f"rank {rank} is silent for {awake - heard:.1f} s"
        if self._led:
            waited_s = awake - self._led[0]
            if waited_s > max(HANG_S, PREDICTED_STEPS * predicted_s):
                step_no = self._num_led - len(self._led) + 1
                late = [str(rank) for rank, num_steps in self._num_steps.items() if num_steps < step_no]
                return f"step {step_no} has not ended on rank {' and '.join(late)} after {waited_s:.1f} s"
        return None
