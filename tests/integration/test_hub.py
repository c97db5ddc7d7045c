"""Checkpoints by hub id: one download however many ask, of one commit; refusals before the weights are fetched."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.workers.model.hub import progress_bar
from support.checkpoints import save_checkpoint
from support.hub_server import HubServer, running_hub

FIRST, SECOND = "1" * 40, "2" * 40
FIND_FOLDER = """
import sys
from pdserve.cluster.base.config import DeploymentConfig
from pdserve.workers.hosting import _folder_on_this_node
from pdserve.workers.plan import WorkerPlan

config = DeploymentConfig.model_validate({"model": {"path": "org/tiny", "revision": sys.argv[2]}})
names = {"worker_id": "mixed-0", "role": "mixed", "served_name": ""}
print(_folder_on_this_node(WorkerPlan(config=config, model_folder=sys.argv[1], channel=None, **names)))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with running_hub() as hub:
        hub.commits["org/tiny"] = [
            (FIRST, save_checkpoint(tmp_path / "first", "qwen3", seed=1)),
            (SECOND, save_checkpoint(tmp_path / "second", "qwen3", seed=2, shards=True)),
        ]
        yield hub


def environment_of(hub: HubServer, home: Path) -> dict[str, str]:
    """For another process: the library reads its environment when it is imported."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hub"),
        "PDSERVE_CACHE_DIR": str(home / "cache"),
        "PDSERVE_STATE_DIR": str(home / "state"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def start(hub: HubServer, home: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pdserve.deploy.cli", *arguments]
    return subprocess.Popen(
        command, env=environment_of(hub, home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def prepare(hub: HubServer, home: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(hub, home, "model", "prepare", *arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err


def test_two_that_ask_at_once_download_once_and_the_next_does_not(hub: HubServer, tmp_path: Path) -> None:
    both = [start(hub, tmp_path / "home", "model", "prepare", "org/tiny") for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    (folder,) = {Path(out.strip()) for out, _ in answers}
    assert folder.name == SECOND, "the main branch"
    shards = [path.name for path in folder.glob("*.safetensors")]
    assert len(shards) > 1
    assert {hub.num_reads[name] for name in (*shards, "config.json", "tokenizer.json")} == {1}
    assert prepare(hub, tmp_path / "home", "org/tiny")[1] == str(folder)
    assert hub.num_reads[shards[0]] == 1


def test_only_the_files_that_are_read_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    # Weights in another form beside them, as large.
    for _, folder in hub.commits["org/tiny"]:
        (folder / "consolidated.safetensors").write_bytes(b"the same again")
    for arguments in ((), ("--revision", FIRST)):
        code, _, err = prepare(hub, tmp_path / "home", "org/tiny", *arguments)
        assert code == 0, err
    assert hub.num_reads["consolidated.safetensors"] == 0
    (hub.commits["org/tiny"][0][1] / "model.safetensors").unlink()
    code, _, err = prepare(hub, tmp_path / "another", "org/tiny", "--revision", FIRST)
    assert code == 2
    assert "org/tiny: it has no model.safetensors" in " ".join(err.split())


def test_a_download_that_was_interrupted_is_finished_by_who_comes_next(hub: HubServer, tmp_path: Path) -> None:
    # Another rank's process on a node: the folder is there, and the weights are not.
    home = tmp_path / "home"
    _, folder, _ = prepare(hub, home, "org/tiny", "--revision", FIRST)
    weights = Path(folder) / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    done = subprocess.run(
        [sys.executable, "-c", FIND_FOLDER, folder, FIRST],
        env=environment_of(hub, home),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == folder, done.stderr
    assert weights.is_file()


def test_progress_goes_up_to_the_whole_over_all_files() -> None:
    seen: list[float] = []
    bars = progress_bar("downloading", lambda stage, share: seen.append(share))
    bytes_bar, files_bar = bars(total=1000), bars(total=4)
    for _ in range(4):
        files_bar.update(1)
        bytes_bar.update(125)
    bytes_bar.update(500)
    assert seen == [0.25, 0.5, 0.75, 1.0]


def test_a_revision_is_another_folder(hub: HubServer, tmp_path: Path) -> None:
    code, out, err = prepare(hub, tmp_path / "home", "org/tiny", "--revision", FIRST)
    assert code == 0, err
    assert Path(out).name == FIRST


def test_what_was_fetched_serves_without_the_hub(hub: HubServer, tmp_path: Path) -> None:
    _, folder, _ = prepare(hub, tmp_path / "home", "org/tiny")
    hub.url = "http://127.0.0.1:1"
    code, out, err = prepare(hub, tmp_path / "home", "org/tiny")
    assert (code, out) == (0, folder), err
    code, _, err = prepare(hub, tmp_path / "elsewhere", "org/tiny")
    assert code == 2
    assert "neither a local folder nor cached, and the hub cannot be reached" in " ".join(err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantised checkpoints"),
        ({"model_type": "no-such-model"}, "no-such-model"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights_are_fetched(
    hub: HubServer, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    config = hub.commits["org/tiny"][-1][1] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    code, _, err = prepare(hub, tmp_path / "home", "org/tiny")
    assert code == 2
    assert message in " ".join(err.split())
    assert not any(name.endswith(".safetensors") for name in hub.num_reads)


def test_what_the_configuration_cannot_serve_is_refused_before_the_weights(hub: HubServer, tmp_path: Path) -> None:
    process = start(hub, tmp_path / "home", "up", "--model", "org/tiny", "--tp", "5", "--port", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "engine.tensor_parallel 5: does not divide" in " ".join(err.split())
    assert not any(name.endswith(".safetensors") for name in hub.num_reads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("org/nobody",), "org/nobody"),
        (("org/tiny", "--revision", "nowhere"), "nowhere"),
        (("demo", "--revision", "main"), "model.path demo is no hub id"),
    ],
)
def test_what_is_not_there_is_named(hub: HubServer, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = prepare(hub, tmp_path / "home", *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
