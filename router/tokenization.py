"""Text to token ids for one model: prompts, chat templates, limits. Blocking; the ingress runs it off its loop.

Rules, documented for users: text prompts get the model's BOS once, also when they spell it; the text of a control token
is that token, in prompts and messages alike (as in transformers); a model without a chat template gets the plain
fallback below.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.router.api import ChatMessage

FALLBACK_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
FALLBACK_STOP = "\nUser:"
"""Ends an answer under the fallback: a base model would go on with the user's next turn."""


BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2): printable bytes are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, folder: Path, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._backend = self._tokenizer.backend_tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._bos_token_id: int | None = self._tokenizer.bos_token_id
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
        self._is_byte_level = "ByteLevel" in str(self._backend.decoder)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._max_model_len

    @property
    def has_chat_template(self) -> bool:
        """False for base models: they get the fallback."""
        return bool(self._tokenizer.chat_template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text; a control token's name, and the space that some tokens begin with."""
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
        if BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def check_token_ids(self, token_ids: Iterable[int], param: str) -> None:
        """Raise InvalidRequestError if one is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"{param} holds token id {token_id}; the vocabulary is 0 to {self._vocab_size - 1}", param=param
                )

    def encode_prompt(self, prompt: str | list[int], param: str = "prompt") -> tuple[int, ...]:
        """Return the ids of a completion prompt. Raises InvalidRequestError naming `param`."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError(f"{param} is empty", param=param)
            self._refuse_hopeless(prompt, param)
            ids = self._encode(prompt, param, add_special_tokens=True)
            if len(ids) > 1 and ids[0] == ids[1] == self._bos_token_id:
                ids = ids[1:]
        else:
            ids = prompt
            self.check_token_ids(ids, param)
        if not ids:
            raise InvalidRequestError(f"{param} is empty", param=param)
        return tuple(ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the ids of a conversation, ready for the assistant's turn. Raises InvalidRequestError."""
        for message in messages:
            self._refuse_hopeless(message.text, "messages")
        if not self.has_chat_template:
            return self.encode_prompt(plain_chat(messages), "messages")
        turns = [_turn(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from error
        return tuple(self._encode(text, "messages", add_special_tokens=False))

    def output_limit(self, num_prompt_tokens: int, max_tokens: int | None, default: int | None, param: str) -> int:
        """Return how many tokens may be generated; `default` None means all that fit.

        Raises InvalidRequestError if the prompt, or prompt and max_tokens together, exceed the limit.
        """
        limit = self._max_model_len
        room = limit - num_prompt_tokens
        if room < 1:
            raise InvalidRequestError(
                f"{param} has {num_prompt_tokens} tokens; with at least one output token that exceeds the limit of "
                f"{limit} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if max_tokens is None:
            return room if default is None else min(default, room)
        if max_tokens > room:
            raise InvalidRequestError(
                f"{param} has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: "
                f"together they exceed the limit of {limit} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"{param} holds lone surrogates", param=param) from error
        return ids

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Refuse a text that is surely too long before tokenizing it: no token is longer than 512 characters."""
        if len(text) > 512 * self._max_model_len:
            raise InvalidRequestError(
                f"{param} has {len(text)} characters and cannot fit the limit of {self._max_model_len} tokens",
                param=param,
                code="context_length_exceeded",
            )


def plain_chat(messages: Sequence[ChatMessage]) -> str:
    """Return the fallback rendering: one `Name: text` line a message, then `Assistant:`; a given name replaces ours."""
    lines = [f"{message.name or FALLBACK_NAMES[message.role]}: {message.text}" for message in messages]
    return "\n".join([*lines, "Assistant:"])


def _turn(message: ChatMessage) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    turn = {"role": role, "content": message.text}
    return turn if message.name is None else {**turn, "name": message.name}
