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

    def __init__(self, *, strips: bool = False) -> None:
        vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
        vocab |= {piece: 257 + number for number, piece in enumerate(("▁", "a", "b", "▁a"))}
        self.tokenizer = Tokenizer(
            models.BPE(vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        self.tokenizer.normalizer = normalizers.Replace(" ", "▁")
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if strips:
            steps.append(decoders.Strip(" ", 1, 0))
        self.tokenizer.decoder = decoders.Sequence(steps)

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


def test_the_space_between_prompt_and_output_is_kept_by_a_decoder_that_strips() -> None:
    # Llama 2's decoder drops the first space of a text; an output is not the start of one.
    decoder = ByteFallbackDecoder(strips=True)
    prompt, output = (decoder.tokenizer.encode(text, add_special_tokens=False).ids for text in ("b", " a b"))
    assert decoder.decode(output) == "a b"
    detokenizer = Detokenizer(decoder, before=prompt)
    assert "".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.flush() == " a b"


def test_an_endless_run_of_broken_bytes_costs_no_more_per_token() -> None:
    class Counting(ByteLevelDecoder):
        longest = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids)

    decoder = Counting()
    detokenizer = Detokenizer(decoder)
    byte = TOKENIZER.backend_tokenizer.encode("é", add_special_tokens=False).ids
    for _ in range(500):
        detokenizer.push([byte[0] if len(byte) > 1 else TOKENIZER.convert_tokens_to_ids("Ł")])
    assert decoder.longest <= 2 * MAX_HELD_TOKENS + 2
