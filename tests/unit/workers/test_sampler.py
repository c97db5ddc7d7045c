"""The sampler: Philox against its published vectors, filters against plain definitions, draws against the CDF."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.workers.engine.plan import SamplingArrays
from pdserve.workers.engine.sampler import philox_uniform, sample_rows

MASK = 0xFFFFFFFF


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 & MASK, (p0 >> 32) ^ counter[3] ^ key[1], p0 & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def arrays(rows: int, **values: float) -> SamplingArrays:
    def full(name: str, default: float) -> NDArray[np.float64]:
        return np.full(rows, values.get(name, default))

    return SamplingArrays(
        temperature=full("temperature", 1.0),
        top_k=full("top_k", 0).astype(np.int32),
        top_p=full("top_p", 1.0),
        min_p=full("min_p", 0.0),
        seed=np.arange(rows, dtype=np.uint64),
        sample=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
    )


def draw_many(logits: NDArray[np.float32], count: int, **values: float) -> NDArray[np.int32]:
    rows = np.broadcast_to(logits, (count, len(logits))).copy()
    return sample_rows(rows, arrays(count, **values), np.arange(count))


def test_the_reference_matches_the_published_vectors() -> None:
    assert philox_reference([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_reference([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_uniforms_are_philox_of_seed_sample_position(seed: int, sample: int, position: int) -> None:
    counter = [position & MASK, position >> 32, sample & MASK, sample >> 32]
    words = philox_reference(counter, [seed & MASK, seed >> 32])
    expected = (((words[0] << 32) | words[1]) >> 11) * 2.0**-53
    assert philox_uniform(np.uint64(seed), np.uint64(sample), np.uint64(position)) == expected
    assert 0.0 <= expected < 1.0


def test_frequencies_follow_the_softmax() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    counts = np.bincount(draw_many(logits, 20000, temperature=0.7), minlength=5) / 20000
    weights = np.exp(logits / 0.7)
    assert np.abs(counts - weights / weights.sum()).max() < 0.015


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 12),
    st.floats(0.05, 1.0),
    st.sampled_from((0.0, 0.05, 0.5)),
    st.sampled_from((0.2, 1.0, 1.9)),
)
def test_only_kept_tokens_are_drawn(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(size=40).astype(np.float32)
    logits[5] = logits[9]  # a tie
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = sorted(range(40), key=lambda token: (-weights[token], token))
    kept = order[:top_k] if top_k else order
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= top_p * total * (1 - 1e-12) and nucleus:
            break
        nucleus.append(token)
        mass += weights[token]
    allowed = {token for token in nucleus if weights[token] >= min_p}
    drawn = draw_many(logits, 200, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    assert set(drawn.tolist()) <= allowed


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 2.999, -5.0], np.float32)
    assert set(draw_many(logits, 50, temperature=temperature).tolist()) == {1}


def test_top_k_one_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([0.0, 4.0, 4.0, 4.0], np.float32)
    assert set(draw_many(logits, 50, top_k=1).tolist()) == {1}


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = np.random.default_rng(0).normal(size=(9, 9000)).astype(np.float32)
    params = arrays(9, top_p=0.9, temperature=0.8)
    together = sample_rows(logits, params, np.arange(9))
    single = [sample_rows(logits[row : row + 1], params, np.array([row]))[0] for row in range(9)]
    assert together.tolist() == single


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_that_are_not_finite_draw_an_id_of_the_vocabulary(bad: float, filters: dict[str, float]) -> None:
    for logits in (np.full(40, bad, np.float32), np.array([0.0, bad, 1.0], np.float32)):
        drawn = draw_many(logits, 20, **filters)
        assert ((drawn >= 0) & (drawn < len(logits))).all()
