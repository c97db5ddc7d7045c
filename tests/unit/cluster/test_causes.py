"""What the controller says of a worker that ended."""

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.control.launcher import cause_of


@pytest.mark.parametrize(
    ("raised", "cause", "is_permanent"),
    [
        (MemoryError(), "MemoryError", False),
        (TimeoutError("\n"), "TimeoutError", False),
        (RuntimeError("first\nlast\n"), "last", False),
        (ConfigError("tensor x is missing"), "tensor x is missing", True),
    ],
)
def test_whatever_a_worker_raised_has_a_cause(raised: Exception, cause: str, *, is_permanent: bool) -> None:
    error = RayTaskError("wait_started", "a traceback", raised).as_instanceof_cause()
    assert cause_of(error, str(error)) == (cause, is_permanent)


@pytest.mark.parametrize(
    ("error", "death", "cause"),
    [
        (ActorDiedError(), "rank 1: its process died", "rank 1: its process died"),
        (RayError(), "", "RayError"),
    ],
)
def test_whatever_ended_a_process_has_a_cause(error: RayError, death: str, cause: str) -> None:
    assert cause_of(error, death) == (cause, False)
