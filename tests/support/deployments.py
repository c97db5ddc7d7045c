"""Deployments for end-to-end tests: the real command, in a state folder of their own, with a check of what is left."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PDSERVE = str(Path(sys.executable).parent / "pdserve")
WAIT_S = 30.0


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until the condition holds; fails with `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


@dataclass
class Traces:
    """What a machine holds now that a deployment could leave behind.

    Processes are counted by session: a deployment's Ray has one of its own, and another deployment that runs beside may
    start and end workers at any time.
    """

    shared_memory: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))
    folders: set[str] = field(default_factory=lambda: _folders())
    sessions: set[int] = field(default_factory=lambda: _ray_sessions())


def _folders() -> set[str]:
    # The second is where Serve puts what it was not told to put elsewhere.
    return {str(path) for pattern in ("pds-*", "haproxy-serve/*") for path in Path("/tmp").glob(pattern)}


def _ray_sessions() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if any(mark in line for mark in ("raylet", "gcs_server", "haproxy", "ray::", "pdserve.deploy", "pds-")):
                found.add(os.getsid(process.pid))
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def assert_nothing_left(before: Traces) -> None:
    """No process, folder or shared memory has come to stay since `before` was taken."""
    wait_for(lambda: Traces().sessions <= before.sessions, "processes are left", 15.0)
    after = Traces()
    assert after.folders <= before.folders
    assert after.shared_memory <= before.shared_memory


class Cli:
    """Runs `pdserve` with its own state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._environment = {**os.environ, "PDSERVE_STATE_DIR": str(state_dir)}

    @property
    def environment(self) -> dict[str, str]:
        """What the commands run with."""
        return self._environment

    def run(self, *arguments: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [PDSERVE, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command in its own session, as a terminal would."""
        return subprocess.Popen(
            [PDSERVE, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@dataclass(frozen=True)
class Running:
    """A deployment that is up."""

    cli: Cli
    name: str
    url: str

    def status(self) -> dict[str, object]:
        """Return what `pdserve status --json` prints."""
        answer = self.cli.run("status", "--name", self.name, "--json")
        assert answer.returncode == 0, answer.stderr
        found: dict[str, object] = json.loads(answer.stdout)
        return found
