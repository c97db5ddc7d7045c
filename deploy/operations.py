"""Commands about a deployment that runs: what it does, why, and changes while it serves. Load Ray when they run."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console

from pdserve.cluster.base.environment import authenticate_to_ray
from pdserve.cluster.base.errors import ConfigError, RetryableError
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import ClusterStatus, WorkerState
from pdserve.deploy.records import DeploymentRecord, running_record
from pdserve.deploy.screen import decision_table, status_table

operations = typer.Typer()

POLL_S = 0.3
PIPE_WIDTH = 160
"""Into a pipe or file, wide enough for whole cells."""

Name = Annotated[str, typer.Option("--name", help="Name of the deployment.")]


def screen() -> Console:
    """Return where tables go."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


@contextmanager
def connected(name: str) -> Iterator[DeploymentRecord]:
    """Connect to a deployment's Ray for a while."""
    record = running_record(name)
    authenticate_to_ray(record.ray_token)
    import ray

    from pdserve.deploy.running import connect

    connect(record)
    try:
        yield record
    finally:
        ray.shutdown()


def status_soon(record: DeploymentRecord) -> ClusterStatus:
    """Return what the controller knows; waits while it restarts. Raises RetryableError if the deployment has ended."""
    from pdserve.deploy.running import deployment_status

    while True:
        try:
            return deployment_status(record)
        except RetryableError:
            if not record.head.is_alive:
                raise
            time.sleep(POLL_S)


def warn_of_outage(found: ClusterStatus, leaving: set[str] | None) -> None:
    """Say so if nobody may take requests for a while, since these workers leave (None: one after the other, all)."""
    owners = [
        view.info.worker_id
        for view in found.workers
        if view.state is WorkerState.READY and view.info.role.owns_requests
    ]
    first = set(owners[:1]) if leaving is None else leaving
    if owners and not set(owners) - first:
        typer.echo(
            f"{owners[0]} is the only worker that takes requests: without room for another beside it, new ones get 503 "
            "until its replacement is ready",
            err=True,
        )


def workers_of(found: ClusterStatus) -> set[str]:
    """Return the workers that serve or drain."""
    return {str(view.info.worker_id) for view in found.workers}


@operations.command()
def status(
    name: Name = "pdserve",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Show the workers of a running deployment and their load."""
    with connected(name) as record:
        from pdserve.deploy.running import deployment_status

        found = deployment_status(record)
    if as_json:
        body = TypeAdapter(ClusterStatus).dump_python(found, mode="json")
        typer.echo(json.dumps({"name": record.name, "url": record.url, **body}, indent=2))
    else:
        screen().print(status_table(record, found))


@operations.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="The `id` of an answer, for example cmpl-…")], name: Name = "pdserve"
) -> None:
    """Show where a request went, why, and what it waited for: queue, prefill, transfer, decode.

    First the decisions, with the candidates that were compared and what each was predicted to take; then what every
    process noted, with times that count from the arrival there. Each keeps its latest 1000 requests, the controller
    4096 decisions.
    """
    with connected(name) as record:
        from pdserve.deploy.running import explain_request

        found = explain_request(record, request_id)
    if not found.traces and not found.decisions:
        raise ConfigError(f"no process of deployment {name!r} remembers a request {request_id!r}")
    for decision in found.decisions:
        screen().print(decision_table(decision))
    for trace in found.traces:
        for timeline in trace.timelines:
            typer.echo(f"{trace.process}  {timeline}")


@operations.command()
def drain(
    worker: Annotated[str, typer.Argument(help="A worker's name, as `pdserve status` shows it, for example decode-0.")],
    name: Name = "pdserve",
    wait: Annotated[bool, typer.Option(help="Return when it has stopped.")] = True,
) -> None:
    """Stop a worker without losing a request.

    What runs there moves to other workers, and another one is started in its place.
    """
    with connected(name) as record:
        from pdserve.deploy.running import drain_worker

        warn_of_outage(status_soon(record), {worker})
        drain_worker(record, WorkerId(worker))
        typer.echo(f"{worker} drains", err=True)
        while wait and worker in workers_of(status_soon(record)):
            time.sleep(POLL_S)
    if wait:
        typer.echo(f"{worker} has stopped", err=True)


@operations.command()
def restart(
    rolling: Annotated[bool, typer.Option("--rolling", help="One worker at a time, without losing a request.")] = False,
    name: Name = "pdserve",
    wait: Annotated[bool, typer.Option(help="Return when every worker was replaced.")] = True,
) -> None:
    """Replace every worker. A new one is started first where there is room; the old one then drains."""
    if not rolling:
        raise ConfigError("restart: only --rolling is there; `pdserve down` and `up` restart everything at once")
    with connected(name) as record:
        from pdserve.deploy.running import restart_rolling

        found = status_soon(record)
        warn_of_outage(found, None)
        before, shown = workers_of(found), ""
        restart_rolling(record)
        while wait and (found := status_soon(record)).rollout:
            if found.rollout != shown:
                typer.echo(found.rollout, err=True)
            shown = found.rollout
            time.sleep(POLL_S)
        if wait and (left := before & workers_of(found)):
            raise RetryableError(f"the controller was restarted in between; not replaced: {', '.join(sorted(left))}")
    typer.echo("every worker was replaced" if wait else "the rolling restart has begun", err=True)
