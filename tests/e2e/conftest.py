"""One deployment of the demo model for all end-to-end tests."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from support.deployments import Cli, Running, Traces, assert_nothing_left

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of this test's own."""
    before = Traces()
    folder = tempfile.mkdtemp(prefix="pdt-")
    monkeypatch.setenv("PYTHONPATH", TESTS)
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder, namespace="t"
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    assert_nothing_left(before)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of this test's own with two nodes, as far as Ray and their addresses are concerned."""
    before = Traces()
    monkeypatch.setenv("PYTHONPATH", TESTS)
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", namespace="t")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert_nothing_left(before)


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command, with a state folder of this session."""
    return Cli(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def deployment(cli: Cli, demo_folder: Path) -> Iterator[Running]:
    """A detached deployment of the demo model; checked to leave nothing behind."""
    before = Traces()
    up = cli.run("up", "--name", "e2e", "--port", "0", "--detach", "--set", "engine.kv_memory_gib=0.5")
    try:
        assert up.returncode == 0, up.stderr
        status = cli.run("status", "--name", "e2e", "--json")
        assert status.returncode == 0, status.stderr
        yield Running(cli, "e2e", json.loads(status.stdout)["url"])
    finally:
        down = cli.run("down", "--name", "e2e")
    assert down.returncode == 0, down.stderr
    assert_nothing_left(before)
