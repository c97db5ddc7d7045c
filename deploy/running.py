"""A deployment that runs: reach it, ask it, take it down. Loads Ray, but no model code.

Ray reads its token once, when it is imported: call config.authenticate_to_ray before importing this module.
"""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from pdserve.cluster.base.environment import state_dir
from pdserve.cluster.base.errors import ConfigError, RetryableError, first_line
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import Explanation
from pdserve.cluster.base.worker_info import ClusterStatus
from pdserve.deploy.locator import CONTROLLER_NAME, namespace_of
from pdserve.deploy.ray_head import stop_head
from pdserve.deploy.records import DeploymentRecord, RecordStore

logger = logging.getLogger(__name__)

STOP_WORKERS_TIMEOUT_S = 20.0
STATUS_TIMEOUT_S = 10.0

Say = Callable[[str], None]
"""Shows a line to whoever runs the command."""


def connect(record: DeploymentRecord) -> None:
    """Connect this process to the deployment's Ray; fine if it is. Raises RetryableError if it does not answer."""
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=record.ray_address,
            namespace=namespace_of(record.name),
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise RetryableError(f"the deployment's Ray at {record.ray_address} does not answer: {error}") from error


def deployment_status(record: DeploymentRecord) -> ClusterStatus:
    """Return what the controller knows; this process must be connected. Raises RetryableError while it is away."""
    status: ClusterStatus = _ask(record, "status")
    return status


def explain_request(record: DeploymentRecord, request_id: str) -> Explanation:
    """Return what the deployment knows of a request; this process must be connected. Raises RetryableError."""
    found: Explanation = _ask(record, "explain", request_id)
    # The ingress first: it saw the request first.
    return replace(found, traces=tuple(sorted(found.traces, key=lambda trace: trace.process)))


def drain_worker(record: DeploymentRecord, worker_id: WorkerId) -> None:
    """Begin to drain a worker; this process must be connected. Raises ConfigError for one that is not ready."""
    _ask(record, "drain", worker_id)


def restart_rolling(record: DeploymentRecord) -> None:
    """Begin to replace every worker; this process must be connected. Raises ConfigError while that goes on."""
    _ask(record, "restart_rolling")


def _ask(record: DeploymentRecord, method: str, *arguments: object) -> Any:
    """Call the controller. Raises ConfigError if it refuses, RetryableError if it does not answer."""
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace_of(record.name))
        return ray.get(getattr(controller, method).remote(*arguments), timeout=STATUS_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(first_line(error.cause)) from error
        raise RetryableError(f"the controller failed: {error.cause}") from error
    except (ray.exceptions.RayError, ValueError) as error:
        raise RetryableError(f"the controller does not answer: {type(error).__name__}: {error}") from error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: a second Ctrl-C in a clean-up, whose steps are bounded, would leave things behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until the block is over: what it makes must be recorded.

    Handlers, not SIG_IGN: a child started inside would inherit that.
    """
    pending: list[int] = []
    before = {
        number: signal.signal(number, lambda found, frame: pending.append(found))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


def take_down(name: str, say: Say) -> bool:
    """Stop everything of a deployment and forget it; False if there was none. Bounded."""
    records = RecordStore(state_dir())
    record = records.load(name)
    if record is None:
        return False
    if record.ray_address and record.head.is_alive:
        try:
            connect(record)
            _stop_actors(name, say)
        except Exception:
            logger.warning("the deployment did not stop cleanly; its processes are ended", exc_info=True)
        finally:
            ray.shutdown()
    stop_head(record.head)
    records.remove(name)
    return True


def _stop_actors(name: str, say: Say) -> None:
    """Stop in the order that leaves nothing: Serve, then workers, then the controller."""
    say("stopping the ingress")
    serve.shutdown()
    say("stopping the workers")
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace_of(name))
    except ValueError:
        return
    ray.get(controller.stop_workers.remote(), timeout=STOP_WORKERS_TIMEOUT_S)
    ray.kill(controller)
