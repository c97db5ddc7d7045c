"""Chooses the attention backend of a worker: by configuration and device, and on CUDA by a self-test at load.

What a library takes depends on its version and the GPU (page sizes, head sizes, dtypes): so each candidate runs a small
case of the deployment's own shape, and is passed by, with the reason, if it refuses or is wrong.
"""

import importlib.util
import logging
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch

from pdserve.cluster.base.engine_config import AttentionKind
from pdserve.cluster.base.errors import ConfigError, first_line
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.attention.numba_cpu import NumbaAttention
from pdserve.workers.attention.protocol import AttentionBackend, AttentionParameters, StepMetadata, build_metadata
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.engine.plan import ForwardPlan
from pdserve.workers.kv.rows import encode_rows

logger = logging.getLogger(__name__)

INVARIANT = (AttentionKind.VARLEN, AttentionKind.TRITON)
"""On CUDA: those that can split every text alike, whatever its neighbours."""
TOLERANCE = 0.03
"""Of bf16 results against fp32 ones, for values of magnitude 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a rank's attention will be asked."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: KVDtype
    windows: tuple[int, ...]
    softcap: float
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """A backend, and its name."""

    backend: AttentionBackend
    kind: AttentionKind
    is_invariant: bool
    """A token's result does not depend on its batch."""


def choose_attention(
    kind: AttentionKind, device: torch.device, shape: AttentionShape, *, is_invariant: bool = False
) -> ChosenAttention:
    """Return the backend. Raises ConfigError if the configured one cannot be used, or none can."""
    if device.type == "cpu":
        return _choose_for_cpu(kind)
    if kind is AttentionKind.NUMBA:
        raise ConfigError(f"engine.attention numba runs on cpu only, not on {device}")
    order = (
        [kind] if kind is not AttentionKind.AUTO else usable_backends(shape, _installed(), is_invariant=is_invariant)
    )
    notes: list[str] = []
    for candidate in order:
        try:
            backend = _make(candidate, device, is_invariant=is_invariant)
            fault = find_fault(backend, device, shape)
        except Exception as error:  # noqa: BLE001 — a library may raise anything; the next one is tried
            fault = f"{type(error).__name__}: {first_line(error)}"
        if fault is None:
            return ChosenAttention(
                backend=backend, kind=candidate, is_invariant=is_invariant and candidate in INVARIANT
            )
        logger.info("attention backend %s is passed by: %s", candidate, fault)
        notes.append(f"attention {candidate}: {fault}")
    raise ConfigError(f"engine.attention {kind}: no backend works here: {'; '.join(notes)}")


def _choose_for_cpu(kind: AttentionKind) -> ChosenAttention:
    if kind in (AttentionKind.AUTO, AttentionKind.NUMBA):
        return ChosenAttention(backend=NumbaAttention(), kind=AttentionKind.NUMBA, is_invariant=True)
    if kind is AttentionKind.TORCH:
        return ChosenAttention(backend=TorchAttention(), kind=kind, is_invariant=False)
    raise ConfigError(f"engine.attention {kind} runs on cuda only")


def _installed() -> set[AttentionKind]:
    """Return the backends whose libraries are here."""
    libraries = {AttentionKind.FLASHINFER: "flashinfer", AttentionKind.TRITON: "triton"}
    found = {kind for kind, library in libraries.items() if importlib.util.find_spec(library) is not None}
    return found | {AttentionKind.VARLEN, AttentionKind.TORCH}


def usable_backends(shape: AttentionShape, installed: Set[AttentionKind], *, is_invariant: bool) -> list[AttentionKind]:
    """Return which of the installed backends to try on CUDA, best first: those that can do what the model asks."""
    order = []
    if not is_invariant and not shape.has_sinks:
        order.append(AttentionKind.FLASHINFER)
    is_half = shape.kv_dtype in (KVDtype.BFLOAT16, KVDtype.FLOAT16)
    if is_half and not shape.softcap and not shape.has_sinks:
        order.append(AttentionKind.VARLEN)
    order.append(AttentionKind.TRITON)
    if not is_invariant:
        order.append(AttentionKind.TORCH)
    return [kind for kind in order if kind in installed]


def _make(kind: AttentionKind, device: torch.device, *, is_invariant: bool) -> AttentionBackend:
    # Each is loaded only where it is used: a machine need not have the libraries of all.
    match kind:
        case AttentionKind.FLASHINFER:
            from pdserve.workers.attention.flashinfer_paged import FlashInferAttention

            return FlashInferAttention(device)
        case AttentionKind.VARLEN:
            from pdserve.workers.attention.varlen import VarlenAttention

            return VarlenAttention(is_invariant=is_invariant)
        case AttentionKind.TRITON:
            from pdserve.workers.attention.triton_paged import TritonAttention

            return TritonAttention()
        case _:
            return TorchAttention()


def find_fault(backend: AttentionBackend, device: torch.device, shape: AttentionShape) -> str | None:
    """Return what is wrong with a backend for a shape: a prefill, a decode and a later chunk; None if nothing.

    Raises whatever the backend raises.
    """
    for window in shape.windows:
        query, kv, step = _make_case(device, shape, window)
        sinks = torch.linspace(-1, 1, shape.num_heads, device=device) if shape.has_sinks else None
        parameters = AttentionParameters(group=0, scale=shape.head_dim**-0.5, softcap=shape.softcap, sinks=sinks)
        found = backend.attend(query, kv, step, parameters).float().cpu()
        expected = TorchAttention().attend(query.float().cpu(), kv.cpu(), step, _on_cpu(parameters))
        worst = float((found - expected).abs().max())
        if not worst <= TOLERANCE:
            return f"its self-test is off by {worst:.3g} with a window of {window}"
    return None


def _on_cpu(parameters: AttentionParameters) -> AttentionParameters:
    sinks = None if parameters.sinks is None else parameters.sinks.cpu()
    return AttentionParameters(group=parameters.group, scale=parameters.scale, softcap=parameters.softcap, sinks=sinks)


def _make_case(
    device: torch.device, shape: AttentionShape, window: int
) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    """Return query, KV and metadata of a decode, a whole prompt and a later chunk, in shuffled blocks."""
    rows = ((3 * shape.block_size + 5, 1), (0, shape.block_size + 3), (2 * shape.block_size, 7))
    generator = torch.Generator().manual_seed(0)
    blocks_each = 5
    table = torch.randperm(len(rows) * blocks_each, generator=generator).numpy().astype(np.int32)
    plan = ForwardPlan(
        token_ids=np.zeros(sum(count for _, count in rows), np.int32),
        positions=np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in rows]),
        row_starts=np.cumsum([0, *(count for _, count in rows)]).astype(np.int32),
        block_tables=(table.reshape(len(rows), blocks_each),),
    )
    query = torch.randn(plan.num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    kv = torch.randn(len(table), 2, shape.num_kv_heads, shape.block_size, shape.head_dim, generator=generator)
    return (
        query.bfloat16().float().to(device),
        encode_rows(kv, shape.kv_dtype).to(device),
        build_metadata(plan, (window,), shape.block_size),
    )
