"""The OpenAI request bodies that pdserve accepts, checked field by field.

Everything is strict: a wrong type, a number out of range, an unknown field or a parameter that is not supported yet is
an InvalidRequestError that names the field. null means "not given", as OpenAI's clients send it.
"""

import math
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.cluster.base.request import TokenBias

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1000
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20

Body = TypeVar("Body", bound="GenerationBody")
Tokens = list[Annotated[int, Field(strict=True)]]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]

# OpenAI parameters that change the answer and are not supported yet, with the value that means "off".
_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class GenerationBody(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: dict[str, Bias] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    stop_token_ids: Tokens | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    user: str | None = Field(default=None, max_length=256)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise _FieldError("stream_options", "is only allowed with stream=true")
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and (self.max_tokens != self.max_completion_tokens)
        ):
            raise _FieldError("max_completion_tokens", "differs from max_tokens; give one of them")
        if self.token_limit == 0 and not self.has_echo:
            name = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
            raise _FieldError(name, "may be 0 only with echo, to score a prompt")
        if self.min_tokens is not None and self.token_limit is not None and self.min_tokens > self.token_limit:
            raise _FieldError("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.token_limit})")
        if self.logit_bias is not None:
            for key in self.logit_bias:
                if not (key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key):
                    raise _FieldError("logit_bias", f"has the key {_shorten(key)}; keys are token ids")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise _FieldError("stop", f"holds {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in stops:
            if not text:
                raise _FieldError("stop", "holds an empty string")
            if len(text) > MAX_STOP_LENGTH:
                raise _FieldError("stop", f"holds a string over {MAX_STOP_LENGTH} characters")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def num_samples(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def has_echo(self) -> bool:
        """True if the prompt is part of the answer."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None reports nothing."""
        return None

    @property
    def biases(self) -> tuple[TokenBias, ...]:
        """logit_bias, by token id."""
        return tuple(TokenBias(token_id=int(key), bias=bias) for key, bias in (self.logit_bias or {}).items())

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | Tokens | list[Tokens]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)

    @property
    def has_echo(self) -> bool:
        """True if the prompt is part of the answer."""
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None reports nothing."""
        return self.logprobs

    @model_validator(mode="after")
    def _prompts_present(self) -> "CompletionBody":
        if isinstance(self.prompt, list):
            if not self.prompt:
                raise _FieldError("prompt", "is empty")
            if not isinstance(self.prompt[0], int) and len(self.prompt) > MAX_PROMPTS:
                raise _FieldError("prompt", f"holds {len(self.prompt)} prompts; at most {MAX_PROMPTS} are allowed")
        if len(self.prompts) * self.num_samples > MAX_CHOICES:
            raise _FieldError("n", f"times {len(self.prompts)} prompts are over {MAX_CHOICES} choices")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[str | list[int]] = []
        if self.prompt and isinstance(self.prompt[0], int):
            prompts.append([token for token in self.prompt if isinstance(token, int)])
            return prompts
        prompts.extend(prompt for prompt in self.prompt if not isinstance(prompt, int))
        return prompts


class TextPart(BaseModel):
    """A text part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Several text parts are joined without a separator."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise _FieldError("top_logprobs", "needs logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class _FieldError(ValueError):
    """A rule over several fields, or within one, is broken; keeps the field's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


def parse_completion(raw: object) -> CompletionBody:
    """Validate the body of /v1/completions."""
    return _parse(CompletionBody, raw)


def parse_chat(raw: object) -> ChatBody:
    """Validate the body of /v1/chat/completions."""
    return _parse(ChatBody, raw)


def _parse(kind: type[Body], raw: object) -> Body:
    if not isinstance(raw, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_body")
    given = {key: value for key, value in raw.items() if value is not None and not _is_off(key, value)}
    unsupported = sorted(str(key) for key in given if key not in kind.model_fields)
    if unsupported:
        name = unsupported[0]
        raise InvalidRequestError(
            f"{name} is not supported (README, Not yet)" if name in KNOWN_FIELDS else f"unknown field {name}",
            param=name,
            code="unsupported_parameter",
        )
    if kind is CompletionBody and given.get("logprobs") is False:
        del given["logprobs"]
    _refuse_mixed_lists(given)
    if "messages" in given:
        given["messages"] = _without_nulls(given["messages"])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from error


def _without_nulls(value: object) -> object:
    """Drop null fields of messages and their parts: OpenAI's clients send back whole answers, `"refusal": null` too."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _refuse_mixed_lists(given: dict[object, object]) -> None:
    """Refuse bad long lists at their first bad element.

    pydantic would collect a complaint for every element and every form that a prompt may have: seconds and gigabytes
    for a body of a few hundred kilobytes.
    """
    limits = {
        "stop": MAX_STOP_STRINGS,
        "messages": MAX_MESSAGES,
        "logit_bias": MAX_BIASES,
        "stop_token_ids": MAX_STOP_TOKENS,
    }
    for field, most in limits.items():
        value = given.get(field)
        if isinstance(value, list | dict) and len(value) > most:
            raise InvalidRequestError(f"{field} holds {len(value)} entries; at most {most} are allowed", param=field)
    prompt = given.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return
    kind = type(prompt[0])
    if kind not in (int, str, list):
        raise InvalidRequestError(
            "prompt must be a text, a list of texts, token ids, or a list of them", param="prompt"
        )
    if kind is not int and len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    for entry in (prompt, *(prompt if kind is list else ())):
        wanted = kind if entry is prompt else int
        if not isinstance(entry, list) or any(type(item) is not wanted for item in entry):
            raise InvalidRequestError(f"prompt mixes {wanted.__name__} with other types", param="prompt")


def _is_off(key: object, value: object) -> bool:
    off = _OFF_VALUES.get(key) if isinstance(key, str) else None
    return off is not None and any(value == candidate and type(value) is type(candidate) for candidate in off)


def _explain(error: ValidationError) -> InvalidRequestError:
    items = error.errors()
    # Of a union's many complaints the one deepest in the value says most.
    item = max(items, key=lambda entry: len(entry["loc"]))
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, _FieldError):
        return InvalidRequestError(str(cause), param=cause.field)
    path = [part for part in item["loc"] if not (isinstance(part, str) and ("[" in part or part in _UNION_TAGS))]
    param = str(path[0]) if path else None
    where = ".".join(str(part) for part in path)
    value = item.get("input")
    shown = "" if isinstance(value, dict | list) or item["type"] == "missing" else f" (got {_shorten(value)})"
    code = "missing_required_parameter" if item["type"] == "missing" else "invalid_value"
    return InvalidRequestError(f"{where}: {item['msg']}{shown}", param=param, code=code)


def _shorten(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_UNION_TAGS = frozenset({"str", "int", "TextPart"})

KNOWN_FIELDS = frozenset(
    {
        "audio", "best_of", "function_call", "functions", "metadata", "modalities",
        "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort", "response_format",
        "safety_identifier", "service_tier", "store", "suffix", "tool_choice", "tools", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
"""OpenAI (and common extension) fields that exist elsewhere but not here yet."""
