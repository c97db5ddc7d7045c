"""The detokenizer never splits a character, and joined pieces equal the one-shot text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.router.detokenizer import MAX_HELD_TOKENS, Detokenizer
from support.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
HARD_TEXT = "ď naïve 🫠 龜 👨‍👩‍👧‍👦 café\n\ttab  東京 Привет"


class ByteLevelDecoder:
    """The byte-level BPE tokenizer of the tests."""

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = TOKENIZER.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class ByteFallbackDecoder:
    """A SentencePiece-like tokenizer: every unknown character becomes byte tokens."""

    def __init__(self) -> None:
        vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
        vocab |= {piece: 257 + number for number, piece in enumerate(("▁", "a", "b", "▁a"))}
        self.tokenizer = Tokenizer(
            models.BPE(vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        self.tokenizer.normalizer = normalizers.Replace(" ", "▁")
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def pieces_of(decoder: ByteLevelDecoder | ByteFallbackDecoder, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


@given(st.text(max_size=40))
def test_joined_pieces_are_the_text(text: str) -> None:
    token_ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(ByteLevelDecoder(), token_ids)
    assert "".join(pieces) == ByteLevelDecoder().decode(token_ids) == text


def test_hard_characters_come_whole_one_token_at_a_time() -> None:
    # known_faults B001
    for decoder in (ByteLevelDecoder(), ByteFallbackDecoder()):
        tokenizer = TOKENIZER.backend_tokenizer if isinstance(decoder, ByteLevelDecoder) else decoder.tokenizer
        token_ids = tokenizer.encode(HARD_TEXT, add_special_tokens=False).ids
        pieces = pieces_of(decoder, token_ids)
        assert "".join(pieces) == decoder.decode(token_ids) == HARD_TEXT
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(3, 511), max_size=60))
def test_random_ids_give_no_replacement_that_the_whole_text_lacks(token_ids: list[int]) -> None:
    pieces = pieces_of(ByteLevelDecoder(), token_ids)
    whole = ByteLevelDecoder().decode(token_ids)
    assert "".join(pieces) == whole


@given(st.lists(st.sampled_from([*range(1, 257), 258, 259, 260]), max_size=40))
def test_random_byte_tokens_give_the_whole_text_or_mark_what_is_broken(token_ids: list[int]) -> None:
    # The one-shot decoder marks every byte of a run with a broken byte; a stream has let the good ones out by then.
    joined, whole = "".join(pieces_of(ByteFallbackDecoder(), token_ids)), ByteFallbackDecoder().decode(token_ids)
    assert joined == whole or "\ufffd" in whole


def test_an_endless_run_of_broken_bytes_is_not_held_for_ever() -> None:
    byte = TOKENIZER.backend_tokenizer.encode("é", add_special_tokens=False).ids
    broken = TOKENIZER.convert_tokens_to_ids("Ł") if len(byte) == 1 else byte[0]
    token_ids = [broken] * 100
    detokenizer = Detokenizer(ByteLevelDecoder())
    emitted = "".join(detokenizer.push([token_id]) for token_id in token_ids)
    assert len(emitted) >= 100 - MAX_HELD_TOKENS - 3
    assert emitted + detokenizer.flush() == ByteLevelDecoder().decode(token_ids)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_several_tokens_at_once_give_the_same_text(size: int) -> None:
    token_ids = TOKENIZER.backend_tokenizer.encode(HARD_TEXT, add_special_tokens=False).ids
    detokenizer = Detokenizer(ByteLevelDecoder())
    parts = [detokenizer.push(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    assert "".join(parts) + detokenizer.flush() == HARD_TEXT
