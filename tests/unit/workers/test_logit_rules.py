"""Penalties, biases and bans against their definition, token by token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cluster.base.request import SamplingParams, TokenBias
from pdserve.workers.engine.logit_rules import LogitRules, apply_rules, has_rules
from pdserve.workers.engine.plan import Float32

VOCABULARY = 40
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)


def changed(rules: LogitRules, logits: Float32, num_output_tokens: int) -> Float32:
    copy = logits.copy()
    apply_rules(copy, rules.row(num_output_tokens))
    return copy


@settings(max_examples=80, deadline=None)
@given(
    tokens,
    tokens,
    st.sampled_from((0.0, 0.5, -1.0)),
    st.sampled_from((0.0, 1.5, -2.0)),
    st.sampled_from((1.0, 1.3, 0.7)),
    st.integers(0, 70),
)
def test_rules_are_their_definition(
    prompt: list[int], output: list[int], frequency: float, presence: float, repetition: float, min_tokens: int
) -> None:
    sampling = SamplingParams(
        max_tokens=100,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=(TokenBias(token_id=7, bias=2.5), TokenBias(token_id=1, bias=-100.0)),
        min_tokens=min_tokens,
        stop_token_ids=(5,),
    )
    logits = np.random.default_rng(len(prompt)).normal(size=VOCABULARY).astype(np.float32)
    counts = Counter(output)
    expected = logits.copy()
    for token in range(VOCABULARY):
        value = np.float32(logits[token])
        if token in counts or token in prompt:
            value = value / np.float32(repetition) if value > 0 else value * np.float32(repetition)
        if token in counts:
            value = value - np.float32(counts[token] * frequency + presence)
        value += np.float32({7: 2.5, 1: -100.0}.get(token, 0.0))
        expected[token] = -np.inf if len(output) < min_tokens and token in (3, 5) else value
    # Resumed: what an earlier attempt emitted counts as output.
    assert np.array_equal(changed(LogitRules(sampling, prompt, output, (3,)), logits, len(output)), expected)
    grown = LogitRules(sampling, prompt, (), (3,))
    for token in output:
        grown.append(token)
    assert np.array_equal(changed(grown, logits, len(output)), expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"stop_token_ids": (5,), "num_logprobs": 3}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": (TokenBias(token_id=1, bias=1.0),)}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_rows_without_rules_pay_nothing(fields: dict[str, object], expected: bool) -> None:
    assert has_rules(SamplingParams(max_tokens=5, **fields)) is expected  # type: ignore[arg-type]
