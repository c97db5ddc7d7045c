"""Packed linears: right results, row invariance, and what happens when a kernel is not invariant."""

import pytest
import torch

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.workers.model.linear import PADDINGS, Linear, LinearFactory, Padding, Product, find_padding
from pdserve.workers.model.numba_ops import divide_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", list(LinearKind))
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 96), (70, 90), (17, 33), (256, 2048)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_right_and_do_not_depend_on_the_batch(
    kind: LinearKind, out_features: int, in_features: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(out_features, in_features) * 0.05).half().float()
    bias = torch.randn(out_features) if has_bias else None
    factory = LinearFactory(kind, CPU)
    linear = factory.pack(weight, bias)
    assert factory.notes == []
    x = torch.randn(77, in_features)
    found = linear(x)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if kind is LinearKind.INT8:
        assert (found.double() - exact).norm() / exact.norm() < 0.025
    else:
        assert (found.double() - exact).abs().max() < 1e-4
    for start, count in ((0, 1), (13, 2), (5, 3), (20, 57), (76, 1)):
        assert torch.equal(linear(x[start : start + count]), found[start : start + count])
    expected = {LinearKind.FP32: 4 * weight.numel(), LinearKind.FP16: 2 * weight.numel()}
    assert linear.memory_bytes == expected.get(kind, weight.numel() + 4 * out_features)


def test_an_outlier_in_one_row_does_not_blur_the_others() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128) * 0.05
    linear = LinearFactory(LinearKind.INT8, CPU).pack(weight)
    x = torch.randn(20, 128)
    plain = linear(x)
    x[7, 5] = 1e4
    assert torch.equal(linear(x)[:7], plain[:7])
    assert torch.equal(linear(x)[8:], plain[8:])
    assert torch.isfinite(linear(torch.zeros(3, 128))).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int8_does_not_hide_what_is_not_finite(bad: float) -> None:
    linear = LinearFactory(LinearKind.INT8, CPU).pack(torch.randn(64, 128))
    x = torch.randn(4, 128)
    x[2, 9] = bad
    found = linear(x)
    assert not torch.isfinite(found[2]).any()
    assert torch.isfinite(found[[0, 1, 3]]).all()


def test_rows_are_divided_alike_one_by_one_and_by_many_threads() -> None:
    x = torch.randn(200, 640)  # more values than one thread takes
    many, largest = divide_rows(x)
    for row in range(0, 200, 17):
        few, own = divide_rows(x[row : row + 1])
        assert torch.equal(few[0], many[row])
        assert torch.equal(own[0], largest[row])


def test_int8_on_an_accelerator_is_refused() -> None:
    factory = LinearFactory(LinearKind.INT8, torch.device("meta"))
    with pytest.raises(ConfigError, match="int8: not on meta yet"):
        factory.pack(torch.ones(4, 4))


def test_the_cheapest_rule_that_holds_is_chosen() -> None:
    weight = torch.randn(5, 8)

    def depends_on_pairs(x: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + (x.shape[0] % 2) * 1e-3

    def depends_on_being_alone(x: torch.Tensor) -> torch.Tensor:
        return x.double() @ weight.double().T + (x.shape[0] == 1) * 1e-3

    assert find_padding(depends_on_being_alone, 8) == Padding(least=2, multiple=1)
    assert find_padding(lambda x: (depends_on_pairs(x.double().float())).double().round(decimals=4), 8) in PADDINGS


def test_a_kernel_without_a_rule_is_replaced_with_a_note() -> None:
    def pack(weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind) -> tuple[Product, int]:
        return (lambda x: x @ weight.T + x.shape[0] * 1e-3), 0

    factory = LinearFactory(LinearKind.FP32, CPU, pack)
    linear = factory.pack(torch.eye(4))
    assert factory.notes == ["packed fp32 4x4 is not row-invariant"]
    assert torch.equal(linear(torch.ones(3, 4)), torch.ones(3, 4))


def test_an_absent_kernel_is_replaced_with_a_note() -> None:
    def absent(weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind) -> tuple[Product, int]:
        raise AttributeError("no such op")

    factory = LinearFactory(LinearKind.FP16, CPU, absent)
    linear = factory.pack(torch.eye(4), torch.ones(4))
    assert factory.notes == ["no packed fp16 kernel: no such op"]
    assert torch.equal(linear(torch.ones(3, 4)), torch.full((3, 4), 2.0))


def test_padding_rows_are_cut_off_again() -> None:
    seen = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x

    linear = Linear(product, Padding(least=2, multiple=3), out_features=2, memory_bytes=0)
    assert [linear(torch.ones(rows, 2)).shape[0] for rows in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert seen == [3, 3, 3, 6]
