"""How late a first token may be: headers before configuration."""

import pytest

from pdserve.cluster.base.config import AdmissionConfig
from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.router.slo import ttft_limit_s

SETTINGS = AdmissionConfig(ttft_limit_s=9.0, classes={"interactive": 0.5, "batch": 60.0})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 9.0),
        ({"x-slo-class": "interactive"}, 0.5),
        ({"x-slo-ttft-ms": "250"}, 0.25),
        ({"x-slo-ttft-ms": "1.5", "x-slo-class": "batch"}, 0.0015),
    ],
)
def test_the_closest_limit_counts(headers: dict[str, str], expected: float) -> None:
    assert ttft_limit_s(headers, SETTINGS) == pytest.approx(expected)
    if not headers:
        assert ttft_limit_s(headers, AdmissionConfig()) is None


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "-5"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "inf"}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": ""}, "x-slo-ttft-ms"),
        ({"x-slo-class": "urgent"}, "x-slo-class"),
    ],
)
def test_a_bad_header_is_named(headers: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ttft_limit_s(headers, SETTINGS)
    assert caught.value.param == param
    assert param in caught.value.message
