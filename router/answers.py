"""The OpenAI response bodies. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.cluster.base.request import FinishReason
from pdserve.router.json_types import Json
from pdserve.router.logprobs import ScoredText, TokenBytes, chat_logprobs, completion_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of an answer."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was cached."""

    def as_json(self) -> Json:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


Scores = Sequence[ScoredText]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What log probabilities are shown with, and how many likely tokens with each; None shows none."""

    tokens: TokenBytes
    num_logprobs: int | None


@dataclass(slots=True, kw_only=True)
class WholeChoice:
    """A finished choice, collected from its pieces."""

    text: str = ""
    finish_reason: FinishReason = FinishReason.ERROR
    scores: list[ScoredText] = field(default_factory=list)


class CompletionShape:
    """Bodies of /v1/completions."""

    endpoint = "completions"
    id_prefix = "cmpl-"

    def __init__(self, request_id: str, model: str, created: int, scoring: Scoring) -> None:
        self._scoring = scoring
        self._head: Json = {"id": request_id, "object": "text_completion", "created": created, "model": model}

    def opening(self, index: int) -> Json | None:
        """Return the chunk before the first text of a choice: none here."""
        return None

    def chunk(self, index: int, text: str, finish_reason: FinishReason | None, scores: Scores = ()) -> Json:
        """Return a streamed chunk."""
        return {**self._head, "choices": [self._choice(index, text, finish_reason, scores)]}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk, with usage and no choice."""
        return {**self._head, "choices": [], "usage": usage.as_json()}

    def whole(self, choices: "list[WholeChoice]", usage: Usage) -> Json:
        """Return the body of an answer that is not streamed."""
        bodies: list[Json] = [
            self._choice(index, choice.text, choice.finish_reason, choice.scores)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": bodies, "usage": usage.as_json()}

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None, scores: Scores) -> Json:
        logprobs = None
        if scores and self._scoring.num_logprobs is not None:
            has_top = self._scoring.num_logprobs > 0
            logprobs = completion_logprobs(scores, self._scoring.tokens, has_top=has_top)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatShape:
    """Bodies of /v1/chat/completions."""

    endpoint = "chat"
    id_prefix = "chatcmpl-"

    def __init__(self, request_id: str, model: str, created: int, scoring: Scoring) -> None:
        self._scoring = scoring
        self._request_id = request_id
        self._model = model
        self._created = created

    def _head(self, kind: str) -> Json:
        return {"id": self._request_id, "object": kind, "created": self._created, "model": self._model}

    def opening(self, index: int) -> Json | None:
        """Return the chunk that names the role."""
        delta: Json = {"role": "assistant", "content": ""}
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def chunk(self, index: int, text: str, finish_reason: FinishReason | None, scores: Scores = ()) -> Json:
        """Return a streamed chunk."""
        delta: Json = {"content": text} if text or scores else {}
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(scores),
            "finish_reason": finish_reason,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk, with usage and no choice."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage.as_json()}

    def whole(self, choices: "list[WholeChoice]", usage: Usage) -> Json:
        """Return the body of an answer that is not streamed."""
        bodies: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.scores),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head("chat.completion"), "choices": bodies, "usage": usage.as_json()}

    def _logprobs(self, scores: Scores) -> Json | None:
        return chat_logprobs(scores, self._scoring.tokens) if scores else None


Shape = CompletionShape | ChatShape


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Json:
    """Return OpenAI's error object. Lone surrogates that a client sent are replaced: JSON cannot carry them."""
    shown = None if param is None else _encodable(param)
    return {"error": {"message": _encodable(message), "type": kind, "param": shown, "code": code}}


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def model_list(names: list[str], created: int) -> Json:
    """Return the body of /v1/models."""
    data: list[Json] = [{"id": name, "object": "model", "created": created, "owned_by": "pdserve"} for name in names]
    return {"object": "list", "data": data}
