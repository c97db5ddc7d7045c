"""What one generation request is, on the wire and in every process.

The ingress fills `Request` once, after validation; the engine only reads it. `TokenDelta` is the only way
tokens travel back.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.cluster.base.ids import RequestId


class FinishReason(StrEnum):
    """How a request ended. Exactly one per sample."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """What is added to a token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The token at one place of a text, and the most likely ones there, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off, penalties at 0 (repetition: 1). `seed` is always set:
    where the client gives none the ingress draws one, so that a replay draws the same tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[TokenBias, ...] = ()
    min_tokens: int = 0
    """No end of sequence and no stop token before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """Most likely tokens to report with each output token; None reports nothing."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request for one sample of an answer.

    `resume_token_ids` are output tokens that an earlier attempt already emitted: they count as output and are
    never sampled again. `sample` selects the random stream. `forks` name further samples, 1, 2, …, that begin when the
    prompt of this one is computed, share its KV, and go on as requests of their own.
    """

    request_id: RequestId
    attempt: int
    prompt_token_ids: tuple[int, ...]
    resume_token_ids: tuple[int, ...] = ()
    sample: int = 0
    forks: tuple[RequestId, ...] = ()
    sampling: SamplingParams
    priority: int = 0
    """Lower is more urgent; only the priority strategy looks at it."""
    tenant: str = ""
    """Who shares fairly with others; only the fair strategy looks at it."""
    cache_salt: str = ""
    """Requests of different salts never share cached KV."""
    ttft_limit_s: float | None = None
    """Refuse it if its first token is predicted later. Only the controller looks at it."""


@dataclass(slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one request, or its ending, or both. Never changed once made.

    Not frozen: one is made for every token, and a frozen one takes three times as long.

    `index` is the position of the first token of `token_ids` in the output (resume tokens counted).
    `error` is set exactly when `finish_reason` is ERROR; `is_retryable` then says that the worker is to blame, so that
    another one may finish the request.
    """

    request_id: RequestId
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_retryable: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed because their KV was cached."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per prompt token from the second on, with the first output token, if they were asked for."""


def forks_of(request: Request) -> list[Request]:
    """Return the requests that go on as request.forks."""
    return [
        replace(request, request_id=request_id, sample=place, forks=(), resume_token_ids=())
        for place, request_id in enumerate(request.forks, start=1)
    ]
