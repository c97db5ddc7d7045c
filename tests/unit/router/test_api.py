"""Request bodies: what is accepted, and that every refusal names its field."""

import time

import pytest

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.router.api import KNOWN_FIELDS, ChatBody, CompletionBody, parse_chat, parse_completion

COMPLETION = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", True),
        ("max_completion_tokens", 0),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", 999999),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", True),
        ("top_p", 0), ("top_p", 1.0001), ("top_p", -1),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 10**10),
        ("min_p", -0.1), ("min_p", 2),
        ("seed", 2**70), ("seed", "1"), ("seed", 1.5),
        ("stop", ["x"] * 5), ("stop", ""), ("stop", ["a", ""]), ("stop", ["y" * 1001]), ("stop", 5), ("stop", [1]),
        ("stop", ["z"] * 10000),
        ("stream", "yes"), ("stream", 1),
        ("stream_options", {"include_usage": True}), ("stream_options", 1),
        ("ignore_eos", "x"),
        ("frequency_penalty", -2.1), ("presence_penalty", 100), ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0), ("repetition_penalty", 1e-46),
        ("repetition_penalty", -1), ("repetition_penalty", 11), ("repetition_penalty", "1"),
        ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"7": 1, "07": 2}),
        ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
        ("logit_bias", {str(number): 1 for number in range(300_000)}), ("logit_bias", {"5": float("nan")}),
        ("min_tokens", -1), ("min_tokens", "1"), ("min_tokens", 1.5),
        ("stop_token_ids", [1.5]), ("stop_token_ids", 5), ("stop_token_ids", list(range(129))),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 1025),
        ("model", 5),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_naming_the_field(field: str, value: object) -> None:
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        with pytest.raises(InvalidRequestError) as caught:
            parse({**body, field: value})
        assert caught.value.param == field
        assert caught.value.status == 400
        assert field in caught.value.message


@pytest.mark.parametrize(
    "prompt",
    [[], [[]] * 129, 5, 1.5, [1.5], ["a", 1], [1, "a"], {"a": 1}, [[1, "x"]], True, [True], ["a"] * 129],
)
def test_wrong_prompts_are_refused_naming_the_field(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"model": "m", "prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [5],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "extra": 1}],
        [{"role": "user", "content": "x"}] * 4097,
    ],
)
def test_wrong_messages_are_refused_naming_the_field(messages: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"model": "m", "messages": messages})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(field: str) -> None:
    body = {key: value for key, value in COMPLETION.items() if key != field}
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion(body)
    assert (caught.value.param, caught.value.code) == (field, "missing_required_parameter")


@pytest.mark.parametrize("field", sorted(KNOWN_FIELDS))
def test_parameters_that_are_not_supported_are_refused_by_name(field: str) -> None:
    for parse, kind, body in ((parse_completion, CompletionBody, COMPLETION), (parse_chat, ChatBody, CHAT)):
        if field in kind.model_fields:
            continue
        with pytest.raises(InvalidRequestError, match="is not supported") as caught:
            parse({**body, field: 7})
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True, "top_logprobs": 1}, 1),
        ({"logprobs": True, "top_logprobs": 20}, 20), ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": False}, None), ({}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"), ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
    ],
)  # fmt: skip
def test_logprobs_of_chat(fields: dict[str, object], expected: int | str | None) -> None:
    # known_faults B014
    if isinstance(expected, str):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat({**CHAT, **fields})
        assert caught.value.param == expected
    else:
        assert parse_chat({**CHAT, **fields}).num_logprobs == expected


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [(0, 0), (1, 1), (5, 5), (None, None), (False, None), (6, "logprobs"), (-1, "logprobs"), (True, "logprobs")],
)
def test_logprobs_of_completions(logprobs: object, expected: int | str | None) -> None:
    # known_faults B014
    if isinstance(expected, str):
        with pytest.raises(InvalidRequestError) as caught:
            parse_completion({**COMPLETION, "logprobs": logprobs})
        assert caught.value.param == expected
    else:
        assert parse_completion({**COMPLETION, "logprobs": logprobs}).num_logprobs == expected


def test_no_output_is_only_for_scoring_and_never_less_than_min_tokens() -> None:
    assert parse_completion({**COMPLETION, "max_tokens": 0, "echo": True}).token_limit == 0
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({**COMPLETION, "max_tokens": 5, "min_tokens": 6})
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("field", ["kv_transfer_params", "min_tokenz", "prefill_host"])
def test_unknown_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown field") as caught:
        parse_completion({**COMPLETION, field: {"host": "10.0.0.1"}})
    assert caught.value.param == field


def test_null_means_not_given_and_off_values_change_nothing() -> None:
    body = parse_completion(
        {
            **COMPLETION,
            "max_tokens": None,
            "stop": None,
            "n": 1,
            "presence_penalty": 0,
            "echo": False,
            "logit_bias": None,
        }
    )
    assert body.token_limit is None
    assert body.stop_strings == ()


def test_both_names_of_the_limit_are_honoured_and_must_agree() -> None:
    assert parse_chat({**CHAT, "max_completion_tokens": 7}).token_limit == 7
    assert parse_chat({**CHAT, "max_completion_tokens": 7, "max_tokens": 7}).token_limit == 7
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({**CHAT, "max_completion_tokens": 7, "max_tokens": 8})
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([""], [""])],
)
def test_prompts_come_in_four_forms(prompt: object, prompts: list[object]) -> None:
    assert parse_completion({"model": "m", "prompt": prompt}).prompts == prompts


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    body = parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].text == "hello"


@pytest.mark.parametrize("raw", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(raw: object) -> None:
    with pytest.raises(InvalidRequestError, match="JSON object"):
        parse_completion(raw)


def test_our_own_answer_can_be_sent_back_in_a_conversation() -> None:
    answer = {"role": "assistant", "content": "Hello!", "refusal": None, "tool_calls": None, "audio": None}
    messages = [{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "And?", "name": None}]
    assert [message.text for message in parse_chat({"model": "m", "messages": messages}).messages] == [
        "Hi",
        "Hello!",
        "And?",
    ]


@pytest.mark.parametrize(
    "prompt",
    [[None] * 500_000, ["a", *[1] * 500_000], [1, *["a"] * 500_000], [[1], *[None] * 100], [["a"] * 500_000], [{}] * 9],
)
def test_a_long_wrong_list_is_refused_at_once(prompt: list[object]) -> None:
    start_time = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"model": "m", "prompt": prompt})
    assert caught.value.param == "prompt"
    assert time.monotonic() - start_time < 0.5
