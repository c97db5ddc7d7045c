"""Token ids to text, piece by piece, never splitting a character.

A piece is what the last tokens add to the text of the tokens before them. While that text ends in U+FFFD, the character
may still be completed by a later token, so it is held back.
"""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16
"""A character has at most four bytes: if this many tokens still end in U+FFFD, all but the last bytes are broken."""
MAX_PARTIAL = 3
"""Bytes that an unfinished character may have shown so far."""


class Decoder(Protocol):
    """Turns ids into text in one go; special tokens are left out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""


class Detokenizer:
    """Detokenizes one output incrementally.

    `before` are the last tokens before the output, the prompt's: some decoders drop a space at the start of a text, and
    the output does not start one.
    """

    def __init__(self, decoder: Decoder, before: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._token_ids: list[int] = list(before)
        # Text of [context, read) has been emitted; it is decoded again so that the next piece joins as it should.
        self._context = 0
        self._read = len(self._token_ids)
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; return the text that is certain now."""
        pieces = []
        for token_id in token_ids:
            self._token_ids.append(token_id)
            pieces.append(self._advance())
        return "".join(pieces)

    def flush(self) -> str:
        """Return what was held back: there are no more tokens."""
        pending = self._pending()
        self._context = self._read = len(self._token_ids)
        self._emitted = 0
        return pending

    def _pending(self) -> str:
        known = self._decoder.decode(self._token_ids[self._context : self._read])
        text = self._decoder.decode(self._token_ids[self._context :])
        return text[len(known) + self._emitted :]

    def _advance(self) -> str:
        pending = self._pending()
        if pending.endswith(REPLACEMENT):
            if len(self._token_ids) - self._read <= MAX_HELD_TOKENS:
                return ""
            return self._give_up_on(pending)
        if pending:
            self._context = self._read
            self._read = len(self._token_ids)
            self._emitted = 0
        return pending

    def _give_up_on(self, pending: str) -> str:
        """Let out all but what one unfinished character may have shown, and decode only the last tokens from now on."""
        self._context = self._read = len(self._token_ids) - MAX_HELD_TOKENS
        self._emitted = max(0, len(self._decoder.decode(self._token_ids[self._context :])) - MAX_PARTIAL)
        return pending[:-MAX_PARTIAL]
