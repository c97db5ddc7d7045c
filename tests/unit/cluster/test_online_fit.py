"""The online fit of laws."""

import random

import pytest

from pdserve.cluster.base.online_fit import OnlineFit


def test_it_finds_the_law_and_says_how_sure_it_is() -> None:
    fit, rng = OnlineFit((1.0, 1e6)), random.Random(2)
    assert (fit.num_observations, fit.relative_error) == (0.0, 1.0)
    for _ in range(300):
        size = rng.randint(0, 4_000_000)
        fit.observe((1.0, size), (0.002 + 1e-9 * size) * rng.uniform(0.95, 1.05))
        assert fit.predict((1.0, size)) >= 0.0
    assert fit.coefficients == pytest.approx((0.002, 1e-9), rel=0.05)
    assert fit.relative_error < 0.06
    assert 150 < fit.num_observations < 200


def test_a_law_that_changes_is_doubted_and_then_found() -> None:
    fit = OnlineFit((1.0,))
    for _ in range(200):
        fit.observe((1.0,), 0.1)
        fit.predict((1.0,))
    assert fit.relative_error < 0.001
    for number in range(400):
        fit.observe((1.0,), 1.0)
        predicted = fit.predict((1.0,))
        if number == 10:
            assert fit.relative_error > 0.3
    assert predicted == pytest.approx(1.0, rel=0.05)


def test_no_coefficient_is_negative_and_the_others_make_up_for_it() -> None:
    fit = OnlineFit((1.0, 1.0))
    for amount in (1.0, 2.0, 3.0, 4.0) * 50:
        # Plain least squares would say 1.25 - 0.2 · amount.
        fit.observe((1.0, amount), 1.25 - 0.2 * amount)
    base, slope = fit.coefficients.tolist()
    assert slope == 0.0
    assert 0.45 < base < 1.05


def test_terms_that_nothing_has_shown_keep_their_prior() -> None:
    fit = OnlineFit((1.0, 100.0, 1000.0))
    fit.begin_with((0.0, 0.002, 0.0))
    assert fit.predict((1.0, 50, 0)) == pytest.approx(0.1)
    for _ in range(100):
        fit.observe((1.0, 0.0, 0.0), 0.01)
    assert fit.predict((1.0, 50, 0)) == pytest.approx(0.11, rel=0.05)
