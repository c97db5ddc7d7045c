"""Deployments of workers with several ranks, by the command: served, broken, started again and again."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from support.deployments import Cli, Traces, assert_nothing_left, wait_for

TINY = ("--port", "0", "--set", "engine.kv_memory_gib=0.05", "--set", "workers.start_timeout_s=60")
NUM_STARTS = 5


def url_of(cli: Cli, name: str) -> str:
    url: str = json.loads(cli.run("status", "--name", name, "--json").stdout)["url"]
    return url


def head_of(cli: Cli, name: str) -> int:
    record = json.loads((Path(cli.environment["PDSERVE_STATE_DIR"]) / f"{name}.json").read_text())
    pid: int = record["head_pid"]
    return pid


def ranks_of(cli: Cli, name: str) -> list[int]:
    """Return the processes of ranks other than 0."""
    session = os.getsid(head_of(cli, name))
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "ray::RankActor" in " ".join(process.info["cmdline"] or ()) and os.getsid(process.pid) == session
    ]


def complete(url: str, model: str, prompt: object, max_tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_the_demo_on_two_ranks_says_the_same_also_after_one_was_killed(cli: Cli) -> None:
    # known_faults B084. The model has one KV head, so both ranks hold it.
    before = Traces()
    arguments = ("--port", "0", "--name", "gang", "--prefill", "1", "--decode", "1", "--decode-tp", "2")
    up = cli.run("up", *arguments, "--set", "engine.kv_memory_gib=0.3", "--detach", timeout_s=110)
    try:
        assert up.returncode == 0, up.stderr
        url = url_of(cli, "gang")
        expected = " the capital of the country of France."
        assert complete(url, "gemma-3-270m", "The capital of France is", 16).startswith(expected)
        (rank,) = ranks_of(cli, "gang")
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: httpx.get(f"{url}/ready", timeout=5).status_code != 200, "nobody notices", 10.0)
        wait_for(lambda: httpx.get(f"{url}/ready", timeout=5).status_code == 200, "it is not replaced", 60.0)
        assert complete(url, "gemma-3-270m", "The capital of France is", 16).startswith(expected)
        assert rank not in ranks_of(cli, "gang")
        assert len(ranks_of(cli, "gang")) == 1
        assert "rank 1" in cli.run("status", "--name", "gang").stdout, "the death and its cause are shown"
    finally:
        down = cli.run("down", "--name", "gang")
    assert down.returncode == 0, down.stderr
    assert_nothing_left(before)


@pytest.mark.timeout(300)  # five deployments
def test_a_gang_starts_again_and_again_however_the_last_one_ended(
    cli: Cli, shared_checkpoints: Callable[[str], Path]
) -> None:
    # known_faults B086.
    model = shared_checkpoints("llama")
    arguments = ("--model", str(model), "--name", "again", "--mixed", "1", "--tp", "2", "--detach")
    before = Traces()
    texts = set()
    for number in range(NUM_STARTS):
        up = cli.run("up", *TINY, *arguments)
        assert up.returncode == 0, (number, up.stderr)
        texts.add(complete(url_of(cli, "again"), model.name, list(range(20, 90)), 8))
        if number % 2:
            for pid in (*ranks_of(cli, "again"), head_of(cli, "again")):
                os.kill(pid, signal.SIGKILL)
        assert cli.run("down", "--name", "again").returncode == 0
        assert_nothing_left(before)
    assert len(texts) == 1
