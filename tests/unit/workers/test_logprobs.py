"""Log probabilities against torch, and their order."""

import numpy as np
import pytest
import torch

from pdserve.workers.engine.logprobs import logprobs_of


@pytest.mark.parametrize("seed", range(6))
def test_values_are_the_log_softmax_and_the_top_is_in_order(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=9000).astype(np.float32) * 5
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    found = logprobs_of(logits, 1234, 20)
    assert found.chosen.token_id == 1234
    assert abs(found.chosen.logprob - float(expected[1234])) < 1e-7
    values, ids = expected.topk(20)
    assert [item.token_id for item in found.top] == ids.tolist()
    assert np.abs(np.array([item.logprob for item in found.top]) - values.numpy()).max() < 1e-7


def test_equal_logits_come_by_lower_id_and_no_more_than_asked() -> None:
    logits = np.zeros(50, np.float32)
    logits[[30, 40]] = 1.0
    assert [item.token_id for item in logprobs_of(logits, 0, 5).top] == [30, 40, 0, 1, 2]
    assert logprobs_of(logits, 0, 0).top == ()
    assert len(logprobs_of(logits, 0, 99).top) == 50


def test_extreme_logits_stay_finite() -> None:
    logits = np.array([-1e30, 3e38, -3e38, 0.0], np.float32)
    found = logprobs_of(logits, 1, 4)
    assert found.chosen.logprob == 0.0
    assert all(np.isfinite(item.logprob) for item in found.top)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise_nothing(bad: float) -> None:
    logits = np.zeros(40, np.float32)
    logits[7] = bad
    assert len(logprobs_of(logits, 3, 5).top) == 5
