"""Log probabilities, echo and what decides endings, through the ingress and a real tiny model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.bits import plain_engine
from support.checkpoints import make_tokenizer
from support.engines import make_engine
from support.services import running_controller, running_ingress, running_worker

PROMPT = "The quick brown fox jumps, naïve 東京"
TOKENIZER = make_tokenizer()
PROMPT_IDS: list[int] = TOKENIZER(PROMPT).input_ids
Body = dict[str, Any]


@pytest.fixture
async def client(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    make_tokenizer().save_pretrained(str(tmp_path))
    engine = plain_engine(make_engine(tiny_checkpoints["qwen2"]))
    async with (
        running_controller() as controller,
        running_worker(controller, engine, stores=(engine.runner.store,)),  # type: ignore[attr-defined]
        running_ingress(controller, tmp_path) as found,
    ):
        yield found


async def complete(client: httpx.AsyncClient, **fields: object) -> Body:
    payload = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=payload)
    assert answer.status_code == 200, answer.text
    body: Body = answer.json()
    return body


async def events(client: httpx.AsyncClient, path: str, payload: Body) -> list[Body]:
    answer = await client.post(path, json={**payload, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("logprobs", [0, 2, 5])
async def test_one_entry_per_token_with_the_chosen_one_among_the_top(client: httpx.AsyncClient, logprobs: int) -> None:
    plain = (await complete(client))["choices"][0]
    assert plain["logprobs"] is None
    choice = (await complete(client, logprobs=logprobs))["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == plain["text"]
    assert [len(found[key]) for key in ("tokens", "token_logprobs", "text_offset")] == [8, 8, 8]
    assert all(value <= 0 for value in found["token_logprobs"])
    if logprobs == 0:
        assert found["top_logprobs"] is None
    else:
        for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            # Greedy: the chosen token is the likeliest. Tokens may share a text, so there may be fewer.
            assert max(top.values()) == top[token] == value
            assert 1 <= len(top) <= logprobs
    whole = "".join(found["tokens"])
    if "\\x" not in whole and "\ufffd" not in choice["text"]:
        assert choice["text"] in whole


async def test_echo_begins_with_the_prompt_and_scores_it(client: httpx.AsyncClient) -> None:
    # known_faults B009, B015
    plain = (await complete(client))["choices"][0]
    for _ in range(2):  # cold, and with the prompt cached
        echoed = await complete(client, echo=True, logprobs=1)
        choice = echoed["choices"][0]
        assert choice["text"] == PROMPT + plain["text"]
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(PROMPT_IDS) + 8
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
        assert found["text_offset"] == sorted(found["text_offset"])
        assert (found["text_offset"][0], found["text_offset"][len(PROMPT_IDS)]) == (0, len(PROMPT))
        scored = await complete(client, echo=True, logprobs=1, max_tokens=0)
        assert scored["choices"][0]["text"] == PROMPT
        assert scored["choices"][0]["finish_reason"] == "length"
        assert scored["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(PROMPT_IDS)]
        assert scored["usage"]["completion_tokens"] == 0
    assert (await complete(client, echo=True))["choices"][0]["text"] == PROMPT + plain["text"]
    from_ids = await complete(client, echo=True, prompt=PROMPT_IDS)
    assert from_ids["choices"][0]["text"] == PROMPT + plain["text"]


@pytest.mark.parametrize("fields", [{"logprobs": 3}, {"logprobs": 0, "echo": True}, {"echo": True}, {}])
async def test_a_stream_carries_what_a_whole_answer_does(client: httpx.AsyncClient, fields: Body) -> None:
    # known_faults B014
    whole = (await complete(client, **fields))["choices"][0]
    payload = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
    chunks = [event["choices"][0] for event in await events(client, "/v1/completions", payload)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    if whole["logprobs"] is None:
        assert not parts
        return
    for key, values in whole["logprobs"].items():
        joined = None if values is None else [item for part in parts for item in part[key]]
        assert joined == values, key


async def test_chat_logprobs_streamed_and_whole(client: httpx.AsyncClient) -> None:
    payload: Body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 4,
    }
    whole = (await client.post("/v1/chat/completions", json=payload)).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert [entry["token"], entry["logprob"]] == [entry["top_logprobs"][0][key] for key in ("token", "logprob")]
        assert len(entry["top_logprobs"]) == 4
        assert bytes(entry["bytes"]).decode("utf-8", "backslashreplace") == entry["token"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    assert whole["message"]["content"] in (text, text.rstrip("\ufffd"))
    chunks = [event["choices"][0] for event in await events(client, "/v1/chat/completions", payload)]
    assert [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == content
    without = {key: value for key, value in payload.items() if key != "top_logprobs"}
    plain = (await client.post("/v1/chat/completions", json=without)).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * 6


async def test_min_tokens_holds_stop_strings_and_stop_tokens_off(client: httpx.AsyncClient) -> None:
    plain = (await complete(client, max_tokens=20))["choices"][0]
    stop = plain["text"][:1]
    assert (await complete(client, max_tokens=20, stop=stop))["choices"][0]["text"] == ""
    held = await complete(client, max_tokens=20, stop=stop, min_tokens=12)
    assert held["usage"]["completion_tokens"] >= 12
    assert held["choices"][0]["text"].startswith(stop)
    biased = {"max_tokens": 6, "logit_bias": {"50": 100}}
    stopped = await complete(client, **biased, stop_token_ids=[50])
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)
    later = await complete(client, **biased, stop_token_ids=[50], min_tokens=4)
    assert (later["choices"][0]["finish_reason"], later["usage"]["completion_tokens"]) == ("stop", 5)


async def test_every_sample_carries_the_scores_of_its_prompt(client: httpx.AsyncClient) -> None:
    answer = await complete(client, echo=True, logprobs=1, n=3, temperature=1.0, seed=2)
    scores = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert [len(found) for found in scores] == [len(PROMPT_IDS) + 8] * 3
    assert scores[0][: len(PROMPT_IDS)] == scores[1][: len(PROMPT_IDS)] == scores[2][: len(PROMPT_IDS)]
    assert len({tuple(found) for found in scores}) == 3


async def test_penalties_keep_a_text_from_repeating_itself(client: httpx.AsyncClient) -> None:
    plain = await complete(client, max_tokens=60, logprobs=0)
    penalised = await complete(client, max_tokens=60, logprobs=0, frequency_penalty=2, presence_penalty=2)

    def most_common(answer: Body) -> int:
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        return max(tokens.count(token) for token in tokens)

    assert most_common(penalised) < most_common(plain)


async def test_cached_tokens_and_salts_show_in_usage(client: httpx.AsyncClient) -> None:
    prompt = [*PROMPT_IDS, *range(30, 70)]
    whole = (len(prompt) - 1) // 16 * 16
    found = []
    for salt in (None, None, "tenant", "tenant"):
        answer = await complete(client, prompt=prompt, **({} if salt is None else {"cache_salt": salt}))
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, whole, 0, whole]
