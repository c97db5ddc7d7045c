"""Packed weight matrices: y = x Wᵀ + b, with the same bits for a row in every batch.

The packed kernels are private ops of torch; this is the only file that calls them. They choose their order of additions
by the number of rows, so each shape is self-tested when it is first packed: the smallest padding rule under which a row
has equal bits at every probed batch size is used. Where an op is absent, or no rule holds, the plain product takes its
place with a warning, and the worker belongs to the tolerance class.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.workers.model.numba_ops import divide_rows

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Tensor | None, LinearKind], tuple[Product, int]]
"""Returns the product with a packed weight [N, K] and bias [N], and the bytes that the packed weight takes."""

PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 23, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128, 257, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Rows are padded to at least `least` and to a multiple of `multiple`."""

    least: int
    multiple: int

    def missing(self, num_rows: int) -> int:
        """Return how many zero rows to add."""
        return max(self.least - num_rows, -num_rows % self.multiple)


PADDINGS = (
    Padding(least=1, multiple=1),
    Padding(least=2, multiple=1),
    Padding(least=1, multiple=3),
    Padding(least=1, multiple=2),
    Padding(least=1, multiple=4),
    Padding(least=1, multiple=8),
    Padding(least=1, multiple=16),
)


class Linear:
    """One weight matrix [N, K], packed; callable on x [T, K]."""

    def __init__(self, product: Product, padding: Padding, *, out_features: int, memory_bytes: int) -> None:
        self._product = product
        self._padding = padding
        self.out_features = out_features
        self.memory_bytes = memory_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, N] for x [T, K]."""
        num_rows = x.shape[0]
        missing = self._padding.missing(num_rows)
        if missing:
            return self._product(torch.nn.functional.pad(x, (0, 0, 0, missing)))[:num_rows]
        return self._product(x)


class LinearFactory:
    """Packs weights of one kind for one device, and remembers what the self-tests found.

    Attributes:
        notes: why packed linears are not in the bitwise class; empty when all are.
    """

    def __init__(
        self, kind: LinearKind, device: torch.device, pack: Pack | None = None, *, is_invariant: bool = False
    ) -> None:
        """`pack` takes the place of torch's packed kernels; `is_invariant` asks for fixed tiles on a GPU."""
        self._kind = kind
        self._packed = pack or _packed
        self._device = device
        self._paddings: dict[tuple[LinearKind, int, int, bool], Padding | None] = {}
        self.notes: list[str] = []
        self._is_tiled = is_invariant and device.type != "cpu"
        if device.type != "cpu" and not is_invariant:
            self.notes.append(f"library kernels on {device.type}")

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: LinearKind | None = None) -> Linear:
        """Pack weight [N, K] (any float dtype, not kept) and bias [N]; `kind` is another one than the factory's."""
        out_features, in_features = weight.shape
        bias = None if bias is None else bias.float()
        kind = kind or self._kind
        if self._device.type != "cpu":
            return self._plain(weight, bias, kind)
        try:
            product, memory_bytes = self._packed(weight.float(), bias, kind)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            self._note(f"no packed {kind} kernel: {error}")
            return self._plain(weight, bias, kind)
        shape = (kind, out_features, in_features, bias is not None)
        if shape not in self._paddings:
            self._paddings[shape] = find_padding(product, in_features)
        padding = self._paddings[shape]
        if padding is None:
            self._note(f"packed {kind} {out_features}x{in_features} is not row-invariant")
            return self._plain(weight, bias, kind)
        return Linear(product, padding, out_features=out_features, memory_bytes=memory_bytes)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            logger.warning("linear kernels drop to the tolerance class: %s", text)
            self.notes.append(text)

    def _plain(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind) -> Linear:
        if kind is LinearKind.INT8 and self._device.type != "cpu":
            raise ConfigError(f"engine.linear int8: not on {self._device.type} yet")
        # On an accelerator the kind names the precision of the weights; the activations follow it there.
        is_half = kind is LinearKind.FP16 and self._device.type != "cpu"
        dtype = torch.bfloat16 if is_half else torch.float32
        held = weight.to(self._device, dtype, copy=True)
        offset = None if bias is None else bias.to(self._device, dtype)
        product = _library_product(held, offset)
        if self._is_tiled:
            # Loaded only where there is a GPU.
            from pdserve.workers.model.triton_linear import TiledProduct

            product = TiledProduct(held, offset)
        return Linear(
            product,
            PADDINGS[0],
            out_features=weight.shape[0],
            memory_bytes=held.numel() * held.element_size(),
        )


def _library_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: torch.nn.functional.linear(x.to(weight.dtype), weight, bias).float()


def _packed(weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind) -> tuple[Product, int]:
    """Return the product with a packed weight, and the bytes that it takes."""
    weight = weight.contiguous()
    if kind is LinearKind.FP16:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        fp16 = torch.ops.quantized.linear_dynamic_fp16
        return (lambda x: fp16(x, packed)), weight.numel() * 2
    if kind is LinearKind.INT8:
        return _pack_int8(weight, bias), weight.numel() + 4 * weight.shape[0]
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    fp32 = torch.ops.mkldnn._linear_pointwise
    return (lambda x: fp32(x, blocked, bias, "none", [], "")), weight.numel() * 4


def _pack_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return x Wᵀ + b for x [T, K], with W in 8 bits, a scale per output, and x in 8 bits, a scale per row.

    The kernel takes one scale for a whole batch. So each row is divided by its own largest magnitude first: the scale
    is always the same, and a row never meets its neighbours'. Sums are of integers, so their order does not matter.
    Where the kernel adds pairs of products in 16 bits, x has 7 bits.
    """
    packed = _prepack_int8(weight)
    most = 127 if _has_full_range() else 63
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def multiply(x: torch.Tensor) -> torch.Tensor:
        scaled, largest = divide_rows(x)
        y: torch.Tensor = product(scaled, 1.0 / most, most + 1, packed)
        y *= largest
        return y if bias is None else y + bias

    return multiply


def _prepack_int8(weight: torch.Tensor) -> torch.ScriptObject:
    # The process-wide choice of kernels; fp16 and fp32 weights do not look at it.
    torch.backends.quantized.engine = "fbgemm"
    scales = (weight.abs().amax(1) / 127).clamp_min(1e-12).double()
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        # Nothing else leads to torch's int8 kernels; the version is pinned.
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel", UserWarning)
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
    return packed


@functools.cache
def _has_full_range() -> bool:
    """True if the int8 kernel takes activations of 8 bits: it does not saturate where every product is largest."""
    packed = _prepack_int8(torch.ones(32, 256))
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    found = product(torch.ones(4, 256), 1.0 / 127, 128, packed)
    return bool((found - 256.0).abs().max() < 4.0)


def find_padding(product: Product, in_features: int) -> Padding | None:
    """Return the cheapest padding under which a row's bits never depend on its batch, or None.

    Each probe asks for the rows of a fixed matrix in batches of PROBE_ROWS sizes, first and last in the batch, at the
    present thread count and at one thread.
    """
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(max(PROBE_ROWS), in_features, generator=generator)
    threads = torch.get_num_threads()
    try:
        return next((padding for padding in PADDINGS if _is_row_invariant(product, padding, x, threads)), None)
    finally:
        torch.set_num_threads(threads)


def _is_row_invariant(product: Product, padding: Padding, x: torch.Tensor, threads: int) -> bool:
    linear = Linear(product, padding, out_features=0, memory_bytes=0)
    torch.set_num_threads(threads)
    whole = linear(x)
    for num_threads in sorted({threads, 1}):
        torch.set_num_threads(num_threads)
        for num_rows in PROBE_ROWS:
            if not torch.equal(linear(x[:num_rows]), whole[:num_rows]):
                return False
            if not torch.equal(linear(x[-num_rows:]), whole[-num_rows:]):
                return False
    return True
