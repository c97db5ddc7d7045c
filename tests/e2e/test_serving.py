"""The demo deployment through real clients."""

import concurrent.futures
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from support.deployments import Running, wait_for

MODEL = "gemma-3-270m"
PLACES = (
    *("Norway", "Peru", "Japan", "Kenya", "Italy", "Canada", "India", "Egypt", "Brazil", "Poland", "Greece"),
    *("Chile", "Iceland", "Nepal", "Cuba", "Ghana", "Spain", "Malta", "Texas", "Ohio", "Alaska", "Paris"),
    *("Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Berlin", "Madrid", "Quito", "Accra"),
)
PROMPTS = [f"{place} is known for its" for place in PLACES]


@pytest.fixture(scope="module")
def client(deployment: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=120)


def gauges(deployment: Running) -> dict[str, float]:
    """Return worker gauges by name, summed over workers."""
    text = httpx.get(f"{deployment.url}/metrics", timeout=10).text
    found: dict[str, float] = {}
    for name, value in re.findall(r'^(pdserve_\w+)\{process="worker:[^}]*\} (\S+)$', text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def is_clean(deployment: Running) -> bool:
    found = gauges(deployment)
    return (
        found.get("pdserve_kv_blocks_free", -1) == found.get("pdserve_kv_blocks_total", 0)
        and found["pdserve_running_sequences"] == found["pdserve_waiting_sequences"] == 0
        and found["pdserve_queued_prompt_tokens"] == 0
        and found["pdserve_kv_transfers_receiving"] == found["pdserve_kv_transfers_sending"] == 0
    )


def assert_clean(deployment: Running) -> None:
    wait_for(lambda: is_clean(deployment), f"LEAK: {gauges(deployment)}", 5.0)


def complete(client: openai.OpenAI, prompt: str, max_tokens: int = 12, **extra: object) -> str:
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra
    )
    return answer.choices[0].text


def complete_all(client: openai.OpenAI, prompts: list[str], max_tokens: int, **extra: object) -> list[str]:
    """Return the texts, asked for at once: they do not depend on the batch (the first test)."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(client, prompt, max_tokens, **extra), prompts))


def stream(client: openai.OpenAI, prompt: str, max_tokens: int = 12) -> tuple[str, list[str], int]:
    """Return text, finish reasons and completion tokens of a streamed answer."""
    events = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, tokens = "", [], 0
    for event in events:
        for choice in event.choices:
            text += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
        if event.usage:
            tokens = event.usage.completion_tokens
    return text, reasons, tokens


def test_32_concurrent_streams_have_the_texts_of_one_at_a_time(client: openai.OpenAI, deployment: Running) -> None:
    expected = [complete(client, prompt) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda prompt: stream(client, prompt), PROMPTS))
    assert [text for text, _, _ in results] == expected
    assert all(len(reasons) == 1 for _, reasons, _ in results)
    assert len({*expected}) > 16
    assert_clean(deployment)


def test_a_seeded_text_is_the_same_alone_and_in_a_crowd(client: openai.OpenAI) -> None:
    def draw() -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1.0, top_p=0.9, seed=11
        )
        return answer.choices[0].text

    alone = draw()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(complete, client, prompt, 40) for prompt in PROMPTS[:12]]
        drawn = [pool.submit(draw) for _ in range(3)]
        assert [future.result() for future in drawn] == [alone] * 3
        for future in crowd:
            future.result()


def test_samples_and_log_probabilities_through_the_client(client: openai.OpenAI, deployment: Running) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=8, n=3, seed=5, logprobs=2, temperature=0.9
    )
    assert len({choice.text for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 8
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a colour."}],
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        frequency_penalty=0.5,
        logit_bias={"107": -100},
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert all(len(entry.top_logprobs) == 3 for entry in chat.choices[0].logprobs.content)
    assert_clean(deployment)


def test_the_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI, deployment: Running) -> None:
    history = "A farmer has a field. " * 30
    first = client.completions.create(model=MODEL, prompt=history, max_tokens=40, temperature=0)
    second = client.completions.create(
        model=MODEL, prompt=history + first.choices[0].text + " Then", max_tokens=4, temperature=0
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens // 16 * 16
    assert_clean(deployment)


def test_chat_answers_and_streams_alike(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is the sky?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    events = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 20


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(deployment: Running, streams: bool) -> None:
    body = {"model": MODEL, "prompt": "Count: 1, 2,", "max_tokens": 4000, "ignore_eos": True, "stream": streams}
    content = json.dumps(body).encode()
    connection = http.client.HTTPConnection(deployment.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(content)))
    # Headers and body in two segments, as most clients send them: HAProxy treats that case differently.
    connection.endheaders()
    connection.send(content)
    answer = connection.getresponse() if streams else None
    if answer is not None:
        assert answer.readline().startswith(b"data: ")
    wait_for(lambda: gauges(deployment)["pdserve_running_sequences"] == 1, "it runs", 10.0)
    left_time = time.monotonic()
    if answer is not None:
        answer.close()
    connection.close()
    wait_for(lambda: is_clean(deployment), "blocks are free again", 5.0)
    assert time.monotonic() - left_time < 1.0


def test_curl_works_as_the_readme_says(deployment: Running) -> None:
    body = json.dumps({"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    command = ["curl", "-sS", f"{deployment.url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "France" in answer["choices"][0]["text"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (json.dumps({"model": MODEL, "prompt": [300000]}).encode(), 400),
        (json.dumps({"model": MODEL, "prompt": [5] * 40000}).encode(), 400),
        (json.dumps({"model": "nobody", "prompt": "x"}).encode(), 404),
        (b'{"model": "gemma-3-270m", "prompt": "' + b"a" * (5 << 20) + b'"}', 413),
    ],
)
def test_bad_input_through_the_whole_path(
    client: openai.OpenAI, deployment: Running, content: bytes, status: int
) -> None:
    answer = httpx.post(
        f"{deployment.url}/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == status, answer.text[:300]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert complete(client, "Hello", 2)


def test_the_openai_client_sees_our_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias holds token id"):
        client.completions.create(model=MODEL, prompt="x", logit_bias={"999999": 1})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")


def test_kill_9_of_the_controller_stops_no_request_and_loses_no_worker(
    client: openai.OpenAI, deployment: Running
) -> None:
    before = deployment.status()
    expected = complete_all(client, PROMPTS[:6], 60)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(stream, client, prompt, 60) for prompt in PROMPTS[:6]]
        wait_for(lambda: gauges(deployment)["pdserve_running_sequences"] == 6, "all run", 10.0)
        os.kill(int(str(before["controller_pid"])), signal.SIGKILL)
        during = [complete(client, prompt, 60) for prompt in PROMPTS[:2]]
        assert [future.result()[0] for future in running] == expected
        assert during == expected[:2]
    wait_for(lambda: httpx.get(f"{deployment.url}/ready").json().get("controller") is True, "it is back", 20.0)
    after = deployment.status()
    assert after["controller_pid"] != before["controller_pid"]
    assert pids(after) == pids(before)
    assert_clean(deployment)


def pids(status: dict[str, object], role: str = "") -> list[int]:
    workers = status["workers"]
    assert isinstance(workers, list)
    return [worker["info"]["pid"] for worker in workers if worker["info"]["role"].startswith(role)]


def worker_ids(deployment: Running) -> set[str]:
    """Return the workers that answer for metrics."""
    text = httpx.get(f"{deployment.url}/metrics", timeout=10).text
    return set(re.findall(r'^pdserve_kv_blocks_total\{process="worker:([^"]*)"', text, re.MULTILINE))


def assert_replaced(deployment: Running, before: set[str], dead: int) -> None:
    """One of the workers `before` has been replaced, and the two are linked."""

    def is_replaced() -> bool:
        after = worker_ids(deployment)
        return len(after) == 2 and len(after & before) == 1 and value_of(deployment, "pdserve_kv_links_open") == 1

    wait_for(is_replaced, "replaced and linked", 60.0)
    status = deployment.status()
    workers = status["workers"]
    assert isinstance(workers, list)
    assert [worker["state"] for worker in workers] == ["ready", "ready"]
    assert [link["state"] for worker in workers for link in worker["load"]["links"]] == ["open"]
    assert dead not in pids(status)


def value_of(deployment: Running, name: str) -> float:
    text = httpx.get(f"{deployment.url}/metrics", timeout=10).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_decode_worker_costs_its_streams_a_pause_and_no_token(
    client: openai.OpenAI, deployment: Running, number: signal.Signals
) -> None:
    expected = complete_all(client, PROMPTS[:20], 60)
    (pid,), before = pids(deployment.status(), "decode"), worker_ids(deployment)
    replays = value_of(deployment, "pdserve_replays_total")
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        running = [pool.submit(stream, client, prompt, 60) for prompt in PROMPTS[:20]]
        wait_for(lambda: value_of(deployment, "pdserve_running_sequences") >= 15, "they stream", 20.0)
        os.kill(pid, number)
        results = [future.result(timeout=100) for future in running]
    assert [text for text, _, _ in results] == expected
    assert all(reasons == ["length"] and tokens == 60 for _, reasons, tokens in results)
    assert value_of(deployment, "pdserve_replays_total") > replays
    assert_replaced(deployment, before, pid)
    assert_clean(deployment)


def test_kill_9_of_the_prefill_worker_in_mid_transfer_changes_no_text(
    client: openai.OpenAI, deployment: Running
) -> None:
    # known_faults B061
    prompts = [f"{place} is a place. " * 120 + f"{place} is known for its" for place in PLACES[:4]]
    # Under another salt, so that the prompts are not cached when they are asked for again.
    expected = complete_all(client, prompts, 8, cache_salt="before")
    (pid,), before = pids(deployment.status(), "prefill"), worker_ids(deployment)
    received = value_of(deployment, "pdserve_kv_received_bytes_total")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream, client, prompt, 8) for prompt in prompts]
        wait_for(lambda: value_of(deployment, "pdserve_kv_received_bytes_total") > received, "chunks arrive", 20.0)
        os.kill(pid, signal.SIGKILL)
        assert [future.result(timeout=100)[0] for future in running] == expected
    assert_replaced(deployment, before, pid)
    assert complete(client, prompts[0], 8) == expected[0]
    assert_clean(deployment)


def test_explain_tells_where_a_request_went(client: openai.OpenAI, deployment: Running) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sea is " * 20, max_tokens=4, temperature=0)
    told = deployment.cli.run("explain", answer.id, "--name", deployment.name)
    assert told.returncode == 0, told.stderr
    for word in ("ingress:", "worker:decode-", "asked prefill-", "prefill starts", "first token", "joins the batch"):
        assert word in told.stdout, told.stdout
    unknown = deployment.cli.run("explain", "cmpl-unknown", "--name", deployment.name)
    assert unknown.returncode == 2
    assert "no process of deployment" in unknown.stderr


def test_status_shows_the_worker_as_a_table(deployment: Running) -> None:
    answer = deployment.cli.run("status", "--name", deployment.name)
    assert answer.returncode == 0, answer.stderr
    for word in ("prefill-", "decode-", "ready", "bitwise", "shm", "open", "controller pid"):
        assert word in answer.stdout


def test_ray_lets_nobody_in_without_the_deployments_token(deployment: Running) -> None:
    record = json.loads((Path(deployment.cli.environment["PDSERVE_STATE_DIR"]) / "e2e.json").read_text())
    code = f"from ray._raylet import GcsClient; print(GcsClient(address={record['ray_address']!r}).cluster_id)"

    def connect(token: str | None) -> subprocess.CompletedProcess[str]:
        settings = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        environment = {**os.environ, **settings}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    for token in (None, "0" * 64):
        refused = connect(token)
        assert refused.returncode != 0
        assert "AuthenticationError" in refused.stderr
    assert connect(record["ray_token"]).returncode == 0


def test_a_second_up_of_the_same_name_is_refused(deployment: Running) -> None:
    answer = deployment.cli.run("up", "--name", deployment.name, "--port", "0", "--detach")
    assert answer.returncode == 2
    assert "already running" in answer.stderr
