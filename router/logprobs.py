"""The log probabilities of an answer in OpenAI's two shapes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.base.request import TokenLogprob
from pdserve.router.json_types import Json


class TokenBytes(Protocol):
    """Knows what a token adds to a text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """One token of an answer with its log probability, and where its text begins."""

    token_id: int
    logprob: float | None
    """None for the first token of a prompt: nothing comes before it."""
    top: tuple[TokenLogprob, ...]
    offset: int
    """Characters of the text before it."""


def completion_logprobs(entries: Sequence[ScoredText], tokens: TokenBytes, *, has_top: bool) -> Json:
    """Return the `logprobs` of a completion's choice; the chosen token is among the top ones, however unlikely."""
    shown = [_shown(tokens.token_bytes(entry.token_id)) for entry in entries]
    tops: list[Json | None] = []
    for entry, text in zip(entries, shown, strict=True):
        if entry.logprob is None or not has_top:
            tops.append(None)
            continue
        top: Json = {}
        # Of several tokens with one text the likeliest counts.
        for item in entry.top:
            top.setdefault(_shown(tokens.token_bytes(item.token_id)), item.logprob)
        top.setdefault(text, entry.logprob)
        tops.append(top)
    return {
        "tokens": list(shown),
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": list(tops) if has_top else None,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[ScoredText], tokens: TokenBytes) -> Json:
    """Return the `logprobs` of a chat choice."""
    content: list[Json] = []
    for entry in entries:
        assert entry.logprob is not None, "a chat answer has no echo"
        top: list[Json] = [_entry(item.token_id, item.logprob, tokens) for item in entry.top]
        content.append({**_entry(entry.token_id, entry.logprob, tokens), "top_logprobs": list(top)})
    return {"content": list(content), "refusal": None}


def _entry(token_id: int, logprob: float, tokens: TokenBytes) -> Json:
    content = tokens.token_bytes(token_id)
    return {"token": _shown(content), "logprob": logprob, "bytes": list(content)}


def _shown(content: bytes) -> str:
    """Return a token's text; bytes that are no whole character are written as \\xNN."""
    return content.decode("utf-8", "backslashreplace")
