"""Stop strings never leak, wherever pieces are cut."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.stop_strings import StopStrings


def filtered(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    stopper = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(stopper.push(piece))
        if stopper.is_stopped:
            break
    if not stopper.is_stopped:
        out.append(stopper.flush())
    return "".join(out), stopper.is_stopped, out


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_text_is_cut_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    text, is_stopped, _ = filtered(pieces, stops)
    whole = "".join(pieces)
    # The first match to be completed counts; of several completed by one piece, the one that starts first.
    if not any(stop in whole for stop in stops):
        assert (text, is_stopped) == (whole, False)
    else:
        assert is_stopped
        assert whole.startswith(text)
        assert not any(stop in text for stop in stops)
        assert any(whole[len(text) :].startswith(stop) for stop in stops)


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=6))
def test_one_stop_string_cuts_at_its_first_place_in_any_split(whole: str, stop: str) -> None:
    text, is_stopped, _ = filtered(list(whole), [stop])
    assert text == whole.partition(stop)[0]
    assert is_stopped == (stop in whole)


def test_a_stop_string_over_many_pieces_is_never_begun() -> None:
    # known_faults B003
    text, is_stopped, out = filtered(["AB", "C", "D", "EF", "G", "HI", "JK"], ["DEFGHIJ"])
    assert (text, is_stopped) == ("ABC", True)
    assert out[2:] == ["", "", "", "", ""]


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    # known_faults B005
    for stops in ([], ["zzz_never"], ["zzz"] * 4):
        _, _, out = filtered(["He", "llo", " wor", "ld"], stops)
        assert out[:4] == ["He", "llo", " wor", "ld"]
