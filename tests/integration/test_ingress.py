"""The ingress application over real channels and a worker on the digest model."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.workers.worker import Worker
from support.checkpoints import make_tokenizer
from support.engines import make_request
from support.services import MODEL, eventually, running_controller, running_ingress, running_worker

PROMPT_IDS = [20, 21, 22, 23]
TOKENIZER = make_tokenizer()
Served = tuple[httpx.AsyncClient, Worker]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
async def served(tokenizer_folder: Path) -> AsyncIterator[Served]:
    async with (
        running_controller() as controller,
        running_worker(controller) as worker,
        running_ingress(controller, tokenizer_folder) as client,
    ):
        yield client, worker


def text_of(prompt_ids: list[int], max_tokens: int) -> str:
    tokens = MODEL.generate(make_request("x", prompt_ids, max_tokens=max_tokens))
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return text


def body(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": PROMPT_IDS, "temperature": 0, "ignore_eos": True, **fields}


async def stream(client: httpx.AsyncClient, path: str, payload: dict[str, object]) -> list[dict[str, object] | str]:
    answer = await client.post(path, json={**payload, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def assert_error(answer: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def usage(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


async def test_a_completion_has_text_usage_and_one_ending(served: Served) -> None:
    answer = (await served[0].post("/v1/completions", json=body(max_tokens=12))).json()
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": text_of(PROMPT_IDS, 12), "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == usage(4, 12)
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


async def test_a_stream_joins_to_the_same_text_and_ends_once(served: Served) -> None:
    payload = body(max_tokens=40, stream_options={"include_usage": True})
    events = await stream(served[0], "/v1/completions", payload)
    assert events[-1] == "[DONE]"
    chunks = [event for event in events if isinstance(event, dict)]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(4, 40)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]  # type: ignore[index]
    assert "".join(choice["text"] for choice in choices) == text_of(PROMPT_IDS, 40)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert not any("usage" in chunk for chunk in chunks[:-1])


async def test_without_the_option_there_is_no_usage_chunk(served: Served) -> None:
    events = await stream(served[0], "/v1/completions", body(max_tokens=3))
    assert all(event == "[DONE]" or (event["choices"] and "usage" not in event) for event in events)  # type: ignore[index]


async def test_several_prompts_give_several_choices(served: Served) -> None:
    prompts = [[20, 21], [30], [40, 41, 42]]
    answer = (await served[0].post("/v1/completions", json=body(prompt=prompts, max_tokens=9))).json()
    assert [choice["text"] for choice in answer["choices"]] == [text_of(prompt, 9) for prompt in prompts]
    assert answer["usage"] == usage(6, 27)
    events = await stream(served[0], "/v1/completions", body(prompt=prompts, max_tokens=9))
    texts, endings = ["", "", ""], []
    for event in events[:-1]:
        (choice,) = event["choices"]  # type: ignore[index, call-overload]
        texts[choice["index"]] += choice["text"]
        endings += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [text_of(prompt, 9) for prompt in prompts]
    assert sorted(endings) == [0, 1, 2]


async def test_text_and_ids_of_one_prompt_give_one_answer(served: Served) -> None:
    text = "The quick brown fox"
    ids = TOKENIZER(text).input_ids
    by_text = (await served[0].post("/v1/completions", json=body(prompt=text, max_tokens=9))).json()
    by_ids = (await served[0].post("/v1/completions", json=body(prompt=ids, max_tokens=9))).json()
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["usage"]["prompt_tokens"] == len(ids)


async def test_chat_uses_the_documented_fallback_for_a_base_model(served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = TOKENIZER("System: Be brief.\nUser: Hi\nAssistant:").input_ids
    payload: dict[str, object] = {
        "model": "tiny",
        "messages": messages,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 8,
    }
    answer = (await served[0].post("/v1/chat/completions", json=payload)).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text_of(prompt, 8), "refusal": None}
    events = await stream(served[0], "/v1/chat/completions", payload)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]  # type: ignore[index, call-overload]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text_of(prompt, 8)
    assert all(delta.get("content") for delta in deltas[1:-1])


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_cuts_the_text_and_frees_the_engine(served: Served, streams: bool) -> None:
    client, worker = served
    whole = text_of(PROMPT_IDS, 200)
    stop = whole[40:46]
    if streams:
        events = await stream(client, "/v1/completions", body(max_tokens=200, stop=stop))
        choices = [event["choices"][0] for event in events[:-1]]  # type: ignore[index, call-overload]
        text = "".join(choice["text"] for choice in choices)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    else:
        (choice,) = (await client.post("/v1/completions", json=body(max_tokens=200, stop=[stop]))).json()["choices"]
        text, reasons = choice["text"], [choice["finish_reason"]]
    assert (text, reasons) == (whole.partition(stop)[0], ["stop"])
    await eventually(lambda: worker.num_live == 0 and worker.load().num_running == 0, "the engine stopped too")


async def test_seeds_repeat_and_differ(served: Served) -> None:
    async def text(seed: int | None) -> str:
        fields = {} if seed is None else {"seed": seed}
        answer = await served[0].post("/v1/completions", json=body(temperature=1.0, max_tokens=12, **fields))
        return str(answer.json()["choices"][0]["text"])

    assert await text(7) == await text(7)
    assert await text(7) != await text(8)
    assert await text(None) != await text(None)
    assert await text(-3) == await text(-3)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": [""]}, 400, "prompt"),
        ({"prompt": [512]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [2**63]}, 400, "prompt"),
        ({"prompt": [20] * 1024}, 400, "prompt"),
        ({"prompt": [20] * 5000}, 400, "prompt"),
        ({"prompt": "word " * 200000}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": [20] * 1000, "max_tokens": 25}, 400, "max_tokens"),
        ({"max_tokens": 10**8}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 100_000}, 400, "n"),
        ({"n": 65, "prompt": [[20], [21]]}, 400, "n"),
        ({"logit_bias": {"512": 1}}, 400, "logit_bias"),
        ({"stop_token_ids": [512]}, 400, "stop_token_ids"),
        ({"min_tokens": 2000}, 400, "min_tokens"),
        ({"logprobs": 6}, 400, "logprobs"),
        ({"stop": ["x"] * 10}, 400, "stop"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"kv_transfer_params": {"host": "10.0.0.1"}}, 400, "kv_transfer_params"),
        ({"\ud800": 1}, 400, "?"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_by_name_and_hurts_nobody(
    served: Served, fields: dict[str, object], status: int, param: str
) -> None:
    client, worker = served
    neighbour = asyncio.create_task(client.post("/v1/completions", json=body(max_tokens=100)))
    content = json.dumps(body(**fields)).encode()
    answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert_error(answer, status, param)
    assert (await neighbour).json()["choices"][0]["text"] == text_of(PROMPT_IDS, 100)
    after = await client.post("/v1/completions", json=body(max_tokens=3))
    assert after.json()["choices"][0]["text"] == text_of(PROMPT_IDS, 3)
    await eventually(lambda: worker.num_live == 0, "nothing is left")


async def test_the_length_limit_is_exact(served: Served) -> None:
    # known_faults B011: 1024 tokens hold prompt and output together.
    for length, max_tokens, status in ((1022, 2, 200), (1023, 1, 200), (1023, 2, 400), (1024, 1, 400), (1022, 3, 400)):
        answer = await served[0].post("/v1/completions", json=body(prompt=[20] * length, max_tokens=max_tokens))
        assert answer.status_code == status, (length, max_tokens, answer.text)
        if status == 400:
            message = answer.json()["error"]["message"]
            assert "1024" in message
            assert str(length) in message
    default = (await served[0].post("/v1/completions", json=body(prompt=[20] * 1020))).json()
    assert default["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "a",}', {"content-type": "application/json"}, 400, "invalid_json"),
        (
            b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
            {"content-type": "application/json"},
            400,
            "invalid_json",
        ),
        (b"\xff\xfe", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[]", {"content-type": "application/json"}, 400, "invalid_body"),
        (b"[" * 100000, {"content-type": "application/json"}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {}, 415, "unsupported_media_type"),
        (b'{"prompt": "' + b"a" * (2 << 20) + b'"}', {"content-type": "application/json"}, 413, "body_too_large"),
    ],
)
async def test_bad_bodies_have_their_status(
    served: Served, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    assert_error(await served[0].post("/v1/completions", content=content, headers=headers), status, None, code)


async def test_unknown_paths_and_methods_answer_in_openai_shape(served: Served) -> None:
    assert_error(await served[0].get("/v1/nothing"), 404)
    assert_error(await served[0].get("/v1/completions"), 405)
    assert_error(await served[0].get("/v1/models/other"), 404, "model", "model_not_found")
    assert (await served[0].get("/v1/models/tiny")).json()["id"] == "tiny"
    assert [model["id"] for model in (await served[0].get("/v1/models")).json()["data"]] == ["tiny"]


async def test_without_a_worker_it_is_alive_but_not_ready(tokenizer_folder: Path) -> None:
    async with running_controller() as controller, running_ingress(controller, tokenizer_folder) as client:
        assert (await client.get("/health")).status_code == 200
        assert_error(await client.get("/ready"), 503)
        answer = await client.post("/v1/completions", json=body())
        assert_error(answer, 503, None, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_done(served: Served) -> None:
    # known_faults B026
    client, worker = served

    post = asyncio.create_task(client.post("/v1/completions", json=body(max_tokens=900, stream=True)))
    await eventually(lambda: worker.load().num_generated_tokens > 5, "it streams")
    worker._engine_failed("it broke")
    lines = [line for line in (await post).text.split("\n\n") if line]
    message = json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert message.startswith("the engine failed: it broke; no other worker took the request in time")
    assert len(lines) > 3
    assert all(json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is None for line in lines[:-1])


async def test_metrics_count_what_the_client_saw(tokenizer_folder: Path) -> None:
    async with (
        running_controller() as controller,
        running_worker(controller),
        running_ingress(controller, tokenizer_folder) as client,
    ):
        for _ in range(5):
            await client.post("/v1/completions", json=body(max_tokens=6))
        await client.post("/v1/completions", json=body(max_tokens=-1))
        await controller.stop()  # then the replica answers for itself
        await eventually(lambda: not controller.workers, "the controller is gone")
        text = (await client.get("/metrics")).text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {
        key.partition("{")[0] + "|" + key.partition(",")[2].rstrip("}"): float(value) for key, value in samples.items()
    }
    assert values['pdserve_requests_finished_total|endpoint="completions",reason="length"'] == 5
    assert values['pdserve_requests_rejected_total|code="400"'] == 1
    assert values["pdserve_generated_tokens_total|"] == 30
    assert values["pdserve_time_to_first_token_seconds_count|"] == 5
    assert values["pdserve_inter_token_latency_seconds_count|"] == 25
    assert values["pdserve_request_duration_seconds_count|"] == 5
    assert values["pdserve_active_requests|"] == 0


def test_deltas_of_another_attempt_are_none_of_ours() -> None:
    from pdserve.cluster.base.errors import ProtocolError
    from pdserve.cluster.base.route import Route
    from pdserve.router.dispatch import RequestStream

    request = make_request("r", [10], max_tokens=9, resume=[1, 2])
    found = RequestStream(request, Route(worker_ids=(), reason=""), 1.0)

    def delta(index: int, tokens: tuple[int, ...], reason: FinishReason | None = None) -> TokenDelta:
        return TokenDelta(request_id=request.request_id, attempt=0, index=index, token_ids=tokens, finish_reason=reason)

    found.deliver(delta(2, (3, 4)))
    found.deliver(delta(2, (3, 4)))
    found.deliver(delta(3, (4, 5)))
    found.deliver(delta(7, (9,)))
    found.deliver(delta(5, (6,)))
    events = [found._events.get_nowait() for _ in range(found._events.qsize())]
    assert [event.token_ids for event in events[:-1] if isinstance(event, TokenDelta)] == [(3, 4), (5,)]
    assert isinstance(events[-1], ProtocolError)
