"""The step-time fit, and the budget it gives."""

import random

import pytest

from pdserve.workers.engine.step_model import LEAST_PREFILL, StepModel, StepShape


def shape(num_tokens: int, num_rows: int = 1, num_context_tokens: int = 0) -> StepShape:
    return StepShape(num_tokens=num_tokens, num_rows=num_rows, num_context_tokens=num_context_tokens)


def duration(step: StepShape) -> float:
    return 0.004 + 0.0008 * step.num_tokens + 0.0003 * step.num_rows + 0.002 * step.num_context_tokens / 1000


def trained(noise: float = 0.0) -> StepModel:
    model, rng = StepModel(), random.Random(1)
    model.calibrate(0.002, 512)
    for _ in range(600):
        rows = rng.randint(1, 32)
        step = shape(rows + rng.choice((0, 0, rng.randint(1, 400))), rows, rng.randint(0, 20000))
        model.observe(step, duration(step) * (1 + noise * rng.uniform(-1, 1)))
    return model


def test_the_fit_finds_the_law_behind_noisy_steps() -> None:
    model = trained(noise=0.1)
    for step in (shape(1), shape(200, 8, 4000), shape(32, 32, 20000)):
        assert model.predict_s(step) == pytest.approx(duration(step), rel=0.1)
    assert model.fit.per_token == pytest.approx(0.0008, rel=0.1)


def test_the_budget_is_the_largest_that_meets_the_target() -> None:
    model = trained()
    decoding = shape(8, 8, 4000)
    budget = model.budget(0.1, decoding, 512)
    assert duration(shape(budget, 8, 4000)) <= 0.1 * 1.02
    assert duration(shape(budget + 3, 8, 4000)) > 0.1 * 0.98
    assert model.budget(100.0, decoding, 512) == 512
    assert model.budget(0.001, decoding, 512) == 8 + LEAST_PREFILL, "prompts go on whatever the target"


def test_without_steps_it_goes_by_what_was_measured_at_load_and_forgets_old_ways() -> None:
    model = StepModel()
    assert model.budget(0.1, shape(4, 4), 512) == 512
    model.calibrate(0.001, 512)
    assert model.predicted_s == 0.512
    assert model.budget(0.1, shape(4, 4), 512) == pytest.approx(100, abs=5)
    model = trained()
    for _ in range(3000):
        model.observe(shape(100, 4, 1000), 0.5)
    assert model.predict_s(shape(100, 4, 1000)) == pytest.approx(0.5, rel=0.06)
