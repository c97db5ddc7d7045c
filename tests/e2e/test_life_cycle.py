"""Starting and stopping: nothing is left, however it ends, and other clusters on the machine do not matter."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from support.deployments import Cli, Running, Traces, assert_nothing_left, wait_for

ROOT = Path(__file__).parents[2]
TINY = ("--port", "0", "--set", "engine.kv_memory_gib=0.05", "--name", "tiny", "--mixed", "1")
APART = ("--prefill", "1", "--decode", "1", "--mixed", "0")


def test_the_demo_answers_and_leaves_nothing_beside_another_cluster(deployment: Running, tmp_path: Path) -> None:
    before = Traces()
    environment = {**os.environ, "PDSERVE_STATE_DIR": str(tmp_path)}
    command = [str(ROOT / "scripts" / "demo"), "--once"]
    answer = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("The capital of France is the capital of the country of France.")
    assert_nothing_left(before)


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    """Read the output up to a line that holds `text`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"ended before {text!r}: {''.join(seen)}")


def end_when_it_says(cli: Cli, model: Path, name: str, line: str, number: signal.Signals, *workers: str) -> int:
    """Run `up` in the foreground until it prints a line, send it a signal, and return how it ended."""
    with cli.start("up", "--model", str(model), *TINY, "--name", name, *workers) as process:
        wait_for_line(process, line)
        process.send_signal(number)
        return process.wait(60)


def test_an_up_leaves_nothing_however_it_ends(cli: Cli, tiny_checkpoints: dict[str, Path]) -> None:
    before = Traces()
    model = tiny_checkpoints["qwen3"]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        endings = [
            pool.submit(end_when_it_says, cli, model, "stopped", "Ctrl-C stops it", signal.SIGINT),
            pool.submit(end_when_it_says, cli, model, "starting", "worker(s)", signal.SIGINT),
            pool.submit(end_when_it_says, cli, model, "killed", "Ctrl-C stops it", signal.SIGKILL, *APART),
        ]
        codes = [ending.result() for ending in endings]
    # The first is 130 if the signal came while it still printed.
    assert codes[0] in (0, 130)
    assert codes[1:] == [130, -signal.SIGKILL]
    assert_nothing_left(before)
    for name in ("stopped", "starting", "killed"):
        assert cli.run("down", "--name", name).stderr == f"no deployment {name!r} is recorded here\n"


UNLIKE = (
    *("--set", "transfer.transports=[torch_dist, nixl, tcp]"),
    *("--set", "workers.engine.decode.kv_dtype=int8", "--set", "workers.engine.decode.block_size=32"),
)


def test_workers_that_hold_kv_unlike_serve_over_gloo_and_what_their_crashed_head_left_is_swept(
    cli: Cli, tiny_checkpoints: dict[str, Path]
) -> None:
    before = Traces()
    up = cli.run("up", "--model", str(tiny_checkpoints["llama"]), *TINY, *APART, *UNLIKE, "--detach")
    assert up.returncode == 0, up.stderr
    url = json.loads(cli.run("status", "--name", "tiny", "--json").stdout)["url"]
    body = {"model": "llama", "prompt": list(range(20, 90)), "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    shown = cli.run("status", "--name", "tiny").stdout
    assert "torch_dist" in shown
    assert "tolerance class: kv_dtype float32 there, int8 here" in shown
    record = json.loads((Path(cli.environment["PDSERVE_STATE_DIR"]) / "tiny.json").read_text())
    os.kill(record["head_pid"], signal.SIGKILL)
    wait_for(lambda: cli.run("status", "--name", "tiny").returncode != 0, "the head is gone", 20.0)
    assert cli.run("down", "--name", "tiny").returncode == 0
    assert_nothing_left(before)


IMPOSSIBLE = (
    (("--model", "/nowhere"), "model.path /nowhere: no such folder or file"),
    (("--set", "engine.kv_memory_gib=900"), "not enough memory"),
    (("--set", "engine.kv_memory_gib=0.0001"), "this model needs at least"),
    (("--set", "engine.blok_size=16"), "engine.blok_size: unknown key; did you mean 'block_size'?"),
    (("--set", "model.max_model_len=10000000"), "model.max_model_len 10000000"),
    (("--set", "noequals"), "must be KEY=VALUE"),
    (("--mixed", "0"), "at least one decode or mixed worker must own requests"),
    (("--prefill", "1"), "prefill workers need a decode worker"),
    (("--set", "workers.num_cpus=900"), "needs 900 CPUs"),
    (("--tp", "3"), "engine.tensor_parallel 3: does not divide the model's"),
    (("--tp", "0"), "engine.tensor_parallel"),
    (("--tp", "-1"), "engine.tensor_parallel"),
    (("--tp", "two"), "--tp"),
    (
        ("--set", "engine.device=cuda", "--set", "engine.kv_dtype=bfloat16", "--tp", "2"),
        "1 mixed of 2 ranks worker(s) need a GPU for each rank, 2 in all; this machine has",
    ),
    (("--config", "/nowhere.yaml"), "cannot read /nowhere.yaml"),
)


def test_an_impossible_configuration_is_refused_before_anything_starts(
    cli: Cli, tiny_checkpoints: dict[str, Path]
) -> None:
    before = Traces()

    def up(arguments: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
        return cli.run("up", "--model", str(tiny_checkpoints["qwen2"]), *TINY, *arguments, timeout_s=60)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(up, (arguments for arguments, _ in IMPOSSIBLE)))
    for (arguments, message), answer in zip(IMPOSSIBLE, answers, strict=True):
        assert answer.returncode == 2, (arguments, answer.stderr)
        assert message in answer.stderr
    assert Traces().sessions <= before.sessions


def test_a_checkpoint_that_cannot_be_loaded_fails_the_start_with_its_cause(
    cli: Cli, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = Traces()
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoints["qwen2"], folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.2.mlp.down_proj.weight")
    save_file(weights, folder / "model.safetensors")
    answer = cli.run("up", "--model", str(folder), *TINY, "--detach")
    assert answer.returncode == 2, answer.stderr
    assert "worker died: mixed-0: did not start" in answer.stderr
    assert "\nerror: workers cannot start: " in answer.stderr
    assert "tensor model.layers.2.mlp.down_proj.weight is missing" in answer.stderr
    assert_nothing_left(before)
