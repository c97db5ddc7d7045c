"""The tiled head: greedy over tiles, ties by token id, mixed batches."""

import numpy as np
import torch

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.workers.engine.plan import NO_TOKEN, SamplingArrays
from pdserve.workers.engine.sampler import sample_rows
from pdserve.workers.model.head import Head
from pdserve.workers.model.linear import LinearFactory


def make_head(weight: torch.Tensor, tile: int) -> Head:
    factory = LinearFactory(LinearKind.FP32, torch.device("cpu"))
    return Head([factory.pack(part) for part in torch.split(weight, tile)], weight.shape[0])


def make_sampling(temperature: list[float]) -> SamplingArrays:
    rows = len(temperature)
    return SamplingArrays(
        temperature=np.array(temperature),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seed=np.arange(rows, dtype=np.uint64),
        sample=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
    )


def test_greedy_is_the_argmax_of_all_tiles_and_draws_use_the_whole_row() -> None:
    torch.manual_seed(0)
    head = make_head(torch.randn(100, 24), 32)
    hidden = torch.randn(6, 24)
    sampling = make_sampling([0.0, 1.0, 0.0, 0.7, 0.0, 2.0])
    found = head.sample(hidden, sampling).token_ids
    logits = head.logits(hidden)
    assert found[[0, 2, 4]].tolist() == logits[[0, 2, 4]].argmax(1).tolist()
    drawn = np.array([1, 3, 5])
    assert found[drawn].tolist() == sample_rows(logits[drawn].numpy(), sampling, drawn).tolist()


def test_ties_over_tiles_break_by_token_id() -> None:
    weight = torch.zeros(96, 8)
    weight[[40, 70, 90]] = 1.0
    head = make_head(weight, 32)
    assert head.sample(torch.ones(1, 8), make_sampling([0.0])).token_ids.tolist() == [40]
    assert head.sample(-torch.ones(1, 8), make_sampling([0.0])).token_ids.tolist() == [0]


def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other() -> None:
    torch.manual_seed(0)
    head = make_head(torch.randn(100, 24), 32)
    hidden = torch.randn(5, 24)
    sampling = make_sampling([0.0, 1.0, 0.0, 0.7, 0.0])
    expected = head.sample(hidden, sampling).token_ids.copy()
    hidden[1, 3], hidden[2, 0] = float("nan"), float("inf")
    expected[[1, 2]] = NO_TOKEN
    assert head.sample(hidden, sampling).token_ids.tolist() == expected.tolist()
