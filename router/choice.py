"""One choice of an answer: token deltas in, text pieces out. Pure.

Detokenizes, applies stop strings and decides the ending. A token that ended the request by itself (end of sequence, or
a stop token) counts in usage and is no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.cluster.base.errors import EngineError
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.router.detokenizer import Decoder, Detokenizer
from pdserve.router.stop_strings import StopStrings

CONTEXT_TOKENS = 6
"""Prompt tokens that the first piece of text is joined to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one delta adds to a choice."""

    text: str
    finish_reason: FinishReason | None


class Choice:
    """State of one choice."""

    def __init__(self, index: int, decoder: Decoder, stops: Sequence[str], prompt_token_ids: Sequence[int]) -> None:
        self.index = index
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._detokenizer = Detokenizer(decoder, before=prompt_token_ids[-CONTEXT_TOKENS:])
        self._stops = StopStrings(stops)

    def push(self, delta: TokenDelta) -> Piece:
        """Take a delta in. Raises EngineError if it carries an error ending."""
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(delta.error or "the engine gave no cause")
        token_ids = delta.token_ids
        if delta.index == 0:
            # Of the first attempt only: what a replay finds in a cache the client has waited for before.
            self.num_cached_tokens = delta.num_cached_tokens
        pieces = []
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_last = position + 1 == len(token_ids)
            if is_last and delta.finish_reason is FinishReason.STOP:
                break
            pieces.append(self._stops.push(self._detokenizer.push((token_id,))))
            if self._stops.is_stopped:
                return Piece(text="".join(pieces), finish_reason=FinishReason.STOP)
        if delta.finish_reason is not None:
            pieces.append(self._stops.push(self._detokenizer.flush()))
            reason = FinishReason.STOP if self._stops.is_stopped else delta.finish_reason
            pieces.append(self._stops.flush())
            return Piece(text="".join(pieces), finish_reason=reason)
        return Piece(text="".join(pieces), finish_reason=None)
