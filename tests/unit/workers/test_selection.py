"""Radix selection against sorting."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.workers.engine.selection import keep_largest

EXPONENTS = st.integers(0, 30)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(EXPONENTS, min_size=1, max_size=60),
    st.integers(0, 70),
    st.sampled_from((0.05, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0)),
    st.sampled_from((0.0, 2.0**-20, 2.0**-3, 1.0)),
)
def test_what_is_kept_is_what_sorting_keeps(exponents: list[int], top_k: int, top_p: float, min_p: float) -> None:
    # Powers of two: many ties, over many magnitudes, and every sum is exact.
    weights = np.exp2(-np.array([*exponents, 0])).astype(np.float32)
    kept = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
    if top_k:
        kept = kept[:top_k]
    if top_p < 1.0:
        wanted = top_p * float(weights[kept].astype(np.float64).sum())
        reached = np.cumsum(weights[kept].astype(np.float64))
        kept = kept[: int(np.searchsorted(reached, wanted)) + 1]
    expected = sorted(place for place in kept if weights[place] >= min_p)
    ids, found = keep_largest(weights, top_k, top_p, min_p)
    assert ids.tolist() == expected
    assert np.array_equal(found, weights[expected])


def test_a_vocabulary_of_equal_weights_keeps_the_lowest_ids() -> None:
    ids, _ = keep_largest(np.ones(5000, np.float32), 0, 0.5, 0.0)
    assert ids.tolist() == list(range(2500))
    ids, _ = keep_largest(np.ones(5000, np.float32), 7, 1.0, 0.0)
    assert ids.tolist() == list(range(7))


def test_a_border_that_rounding_hides_is_found_in_every_digit() -> None:
    # The same weights summed in other groups may be rounded to just under what was reached: never everything is kept.
    rng = np.random.default_rng(4)
    for _ in range(300):
        weights = np.exp(rng.normal(scale=3.0, size=300)).astype(np.float32)
        weights /= weights.max()
        reached = np.cumsum(np.sort(weights.astype(np.float64))[::-1])
        for count in (3, 50, 150):
            top_p = float(reached[count] / reached[-1])
            for shift in (-1, 0, 1):
                ids, _ = keep_largest(weights, 0, top_p * (1 + shift * 2**-52), 0.0)
                assert count <= len(ids) <= count + 3
