"""Thousands of fault schedules over real workers in virtual time; see support/fault_schedules.

`--fault-schedules N` runs N of them instead of 2,000; `--fault-seed S` runs one, with its log.
"""

import logging
from collections import Counter

import pytest

from support.fault_schedules import Schedule
from support.faulty_transport import Fault

NUM_BATCHES = 20


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_text_is_right_or_its_error_is_told_once_and_nothing_leaks(
    batch: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # known_faults B051, B053, B055, B057, B059, B061, B062, B063, B064, B066, B071; I1 to I16, I18
    if request.config.getoption("--fault-seed") is not None:
        pytest.skip("--fault-seed runs one schedule by itself")
    # Broken links are logged as warnings, by the thousand.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    count = request.config.getoption("--fault-schedules") // NUM_BATCHES
    seen: Counter[str] = Counter()
    for seed in range(batch * count, (batch + 1) * count):
        try:
            outcome = Schedule(seed, monkeypatch).run()
        except BaseException as error:
            error.add_note(
                f"fault schedule {seed}: pytest tests/integration/test_fault_schedules.py --fault-seed {seed}"
            )
            raise
        seen.update(outcome.faults)
        seen["finished"] += outcome.num_finished
        seen["failed over"] += outcome.num_failovers > 0
        seen["deaths"] += outcome.num_deaths
        seen["committed"] += outcome.num_committed > 0
    if count >= 50:
        # The faults happened, and most requests were served over links all the same.
        assert all(seen[fault] for fault in Fault), seen
        assert min(seen[name] for name in ("finished", "failed over", "deaths", "committed")) > 0
        assert seen["finished"] > 2 * count
        assert seen["committed"] > count / 2


def test_one_schedule_of_choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = request.config.getoption("--fault-seed")
    schedule = Schedule(0 if seed is None else seed, monkeypatch)
    assert schedule.run().virtual_s > 0
