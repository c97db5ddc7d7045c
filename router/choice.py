"""One choice of an answer: token deltas in, text pieces out. Pure.

Detokenizes, applies stop strings and decides the ending. A token that ended the request by itself (end of sequence, or
a stop token) counts in usage and is no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.cluster.base.errors import EngineError
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.router.detokenizer import Decoder, Detokenizer
from pdserve.router.logprobs import ScoredText
from pdserve.router.stop_strings import StopStrings

CONTEXT_TOKENS = 6
"""Prompt tokens that the first piece of text is joined to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """How a choice turns tokens into an answer."""

    prompt_token_ids: tuple[int, ...]
    stops: Sequence[str] = ()
    min_tokens: int = 0
    """Stop strings are not looked for before this many tokens."""
    echo: str | None = None
    """The prompt's text, if the answer begins with it."""
    has_output: bool = True
    """False if only the prompt is wanted: what is sampled is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one delta adds to a choice."""

    text: str
    finish_reason: FinishReason | None
    scores: tuple[ScoredText, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if it adds nothing."""
        return not self.text and not self.scores and self.finish_reason is None


class Choice:
    """State of one choice."""

    def __init__(self, index: int, decoder: Decoder, plan: ChoicePlan) -> None:
        self.index = index
        self.num_prompt_tokens = len(plan.prompt_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._plan = plan
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder, before=plan.prompt_token_ids[-CONTEXT_TOKENS:])
        self._stops = StopStrings(plan.stops)
        self._num_characters = 0

    def push(self, delta: TokenDelta) -> Piece:
        """Take a delta in. Raises EngineError if it carries an error ending."""
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(delta.error or "the engine gave no cause")
        pieces: list[str] = []
        scores: list[ScoredText] = []
        if delta.index == 0:
            # Of the first attempt only: what a replay finds in a cache the client has waited for before.
            self.num_cached_tokens = delta.num_cached_tokens
            if self.num_tokens == 0 and (delta.token_ids or delta.finish_reason is not None):
                self._begin(delta, pieces, scores)
        if not self._plan.has_output:
            reason = None if delta.finish_reason is None else FinishReason.LENGTH
            return Piece(text="".join(pieces), finish_reason=reason, scores=tuple(scores))
        reason = self._take_tokens(delta, pieces, scores)
        return Piece(text="".join(pieces), finish_reason=reason, scores=tuple(scores))

    def _begin(self, delta: TokenDelta, pieces: list[str], scores: list[ScoredText]) -> None:
        """Begin the answer with the prompt, if that is wanted."""
        if self._plan.echo is None:
            return
        pieces.append(self._plan.echo)
        self._num_characters = len(self._plan.echo)
        if not delta.prompt_logprobs and not delta.logprobs:
            return
        ids, offset = self._plan.prompt_token_ids, 0
        for place, token_id in enumerate(ids):
            known = delta.prompt_logprobs[place - 1] if place else None
            scores.append(
                ScoredText(
                    token_id=token_id,
                    logprob=None if known is None else known.chosen.logprob,
                    top=() if known is None else known.top,
                    offset=offset,
                )
            )
            offset = min(offset + len(self._decoder.decode((token_id,))), self._num_characters)

    def _take_tokens(self, delta: TokenDelta, pieces: list[str], scores: list[ScoredText]) -> FinishReason | None:
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if delta.logprobs:
                logprobs = delta.logprobs[position]
                scores.append(
                    ScoredText(
                        token_id=token_id,
                        logprob=logprobs.chosen.logprob,
                        top=logprobs.top,
                        offset=self._num_characters,
                    )
                )
            is_last = position + 1 == len(delta.token_ids)
            if is_last and delta.finish_reason is FinishReason.STOP:
                break
            text = self._detokenizer.push((token_id,))
            self._num_characters += len(text)
            if self.num_tokens < self._plan.min_tokens:
                pieces.append(text)
                continue
            pieces.append(self._stops.push(text))
            if self._stops.is_stopped:
                return FinishReason.STOP
        if delta.finish_reason is None:
            return None
        pieces.append(self._stops.push(self._detokenizer.flush()))
        reason = FinishReason.STOP if self._stops.is_stopped else delta.finish_reason
        pieces.append(self._stops.flush())
        return reason
