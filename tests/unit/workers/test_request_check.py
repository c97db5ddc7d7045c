"""Numbers that would not fit an array of the engine."""

from dataclasses import replace

import pytest

from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.cluster.base.request import TokenBias
from pdserve.workers.engine.request_check import check_numbers
from support.engines import make_request

RIGHT = make_request(
    "r", [1, 99], max_tokens=5, seed=2**64 - 1, stop_token_ids=(3,), logit_bias=(TokenBias(token_id=4, bias=1.5),)
)


def test_what_is_possible_passes() -> None:
    check_numbers(RIGHT, 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_token_ids", (1, 100)),
        ("prompt_token_ids", (-1,)),
        ("prompt_token_ids", (2**40,)),
        ("resume_token_ids", (2**31,)),
        ("sample", -1),
        ("sample", 2**40),
    ],
)
def test_a_request_that_is_not_possible_is_refused(field: str, value: object) -> None:
    # known_faults B071
    with pytest.raises(InvalidRequestError):
        check_numbers(replace(RIGHT, **{field: value}), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("top_k", 2**31),
        ("top_k", -1),
        ("max_tokens", 2**40),
        ("num_logprobs", 101),
        ("num_prompt_logprobs", -1),
        ("stop_token_ids", (100,)),
        ("logit_bias", (TokenBias(token_id=-2, bias=1.0),)),
        ("logit_bias", (TokenBias(token_id=2, bias=float("nan")),)),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
    ],
)
def test_sampling_that_is_not_possible_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError):
        check_numbers(replace(RIGHT, sampling=replace(RIGHT.sampling, **{field: value})), 100)  # type: ignore[arg-type]
