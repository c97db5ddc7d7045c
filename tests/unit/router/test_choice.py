"""One choice: endings, usage, stop strings and stop tokens."""

from collections.abc import Sequence

import pytest

from pdserve.cluster.base.errors import EngineError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.router.choice import Choice, ChoicePlan


class Letters:
    """Token n is the n-th letter."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def delta(token_ids: Sequence[int], reason: FinishReason | None = None, error: str | None = None) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId("r"),
        attempt=0,
        index=0,
        token_ids=tuple(token_ids),
        finish_reason=reason,
        error=error,
    )


def make_choice(**plan: object) -> Choice:
    return Choice(0, Letters(), ChoicePlan(prompt_token_ids=(7, 8, 9), **plan))  # type: ignore[arg-type]


def test_the_stop_token_counts_and_is_no_text() -> None:
    choice = make_choice()
    assert choice.push(delta([0])).text == "a"
    piece = choice.push(delta([1, 2], FinishReason.STOP))
    assert (piece.text, piece.finish_reason, choice.num_tokens) == ("b", FinishReason.STOP, 3)


def test_the_last_token_of_a_length_ending_is_text() -> None:
    choice = make_choice()
    piece = choice.push(delta([1, 2], FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == ("bc", FinishReason.LENGTH)


def test_a_stop_string_ends_within_a_delta_and_counts_up_to_its_last_token() -> None:
    choice = make_choice(stops=("cd",))
    piece = choice.push(delta([0, 1, 2, 3, 4, 5]))
    assert (piece.text, piece.finish_reason, choice.num_tokens) == ("ab", FinishReason.STOP, 4)


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    choice = make_choice(stops=("bc",))
    piece = choice.push(delta([0, 1, 2], FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason) == ("a", FinishReason.STOP)


def test_what_was_held_for_a_stop_string_comes_out_at_the_end() -> None:
    choice = make_choice(stops=("bx",))
    assert choice.push(delta([0, 1])).text == "a"
    assert choice.push(delta([], FinishReason.LENGTH)).text == "b"


def test_an_error_ending_raises_its_cause() -> None:
    with pytest.raises(EngineError, match="boom"):
        make_choice().push(delta([], FinishReason.ERROR, "boom"))
