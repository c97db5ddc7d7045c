"""Which attention backend a worker takes, what FlashInfer is told, and how much KV a GPU holds."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.cluster.base.engine_config import AttentionKind, EngineConfig, NumericsKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.attention.choice import AttentionShape, choose_attention, usable_backends
from pdserve.workers.attention.flashinfer_paged import page_lists
from pdserve.workers.attention.numba_cpu import NumbaAttention
from pdserve.workers.attention.protocol import build_metadata
from pdserve.workers.attention.torch_reference import TorchAttention
from pdserve.workers.memory_plan import WORKING_BYTES, device_kv_gib, plan_memory
from pdserve.workers.model.families import ModelSpec, read_spec
from support.attention import make_plan
from support.checkpoints import make_config

GIB = 1 << 30
CPU = torch.device("cpu")


def make_shape(**changes: object) -> AttentionShape:
    plain = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "block_size": 16,
        "kv_dtype": KVDtype.BFLOAT16,
        "windows": (0,),
        "softcap": 0.0,
        "has_sinks": False,
    }
    return AttentionShape(**{**plain, **changes})  # type: ignore[arg-type]


def test_a_cpu_has_numba_and_the_reference() -> None:
    assert isinstance(choose_attention(AttentionKind.AUTO, CPU, make_shape()).backend, NumbaAttention)
    chosen = choose_attention(AttentionKind.TORCH, CPU, make_shape())
    assert isinstance(chosen.backend, TorchAttention)
    assert not chosen.is_invariant
    with pytest.raises(ConfigError, match=r"engine.attention triton runs on cuda only"):
        choose_attention(AttentionKind.TRITON, CPU, make_shape())


@pytest.mark.parametrize(
    ("shape", "is_invariant", "expected"),
    [
        (make_shape(), False, ["flashinfer", "varlen", "triton", "torch"]),
        (make_shape(), True, ["varlen", "triton"]),
        (make_shape(softcap=30.0), False, ["flashinfer", "triton", "torch"]),
        (make_shape(has_sinks=True), True, ["triton"]),
        (make_shape(kv_dtype=KVDtype.FLOAT8), False, ["flashinfer", "triton", "torch"]),
    ],
)
def test_only_backends_that_can_do_what_the_model_asks_are_tried(
    shape: AttentionShape, is_invariant: bool, expected: list[str]
) -> None:
    everything = {kind for kind in AttentionKind if kind is not AttentionKind.AUTO}
    assert [kind.value for kind in usable_backends(shape, everything, is_invariant=is_invariant)] == expected
    without = everything - {AttentionKind.FLASHINFER}
    found = usable_backends(shape, without, is_invariant=is_invariant)
    assert [kind.value for kind in found] == [name for name in expected if name != "flashinfer"]


def test_a_library_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Also where it is installed.
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "pdserve.workers.attention.flashinfer_paged", raising=False)
    with pytest.raises(ConfigError, match=r"attention flashinfer: ModuleNotFoundError"):
        choose_attention(AttentionKind.FLASHINFER, torch.device("meta"), make_shape())


@pytest.mark.parametrize("window", [0, 20])
def test_pages_cover_what_the_queries_of_a_row_see(window: int) -> None:
    rows = [(0, 5), (40, 3), (63, 1), (16, 16)]
    table: NDArray[np.int32] = np.arange(20, dtype=np.int32).reshape(4, 5)
    step = build_metadata(make_plan(rows, table), (window,), 16)
    indptr, pages, last = page_lists(step, 0, 16)
    for row, (first, count) in enumerate(rows):
        own = pages[indptr[row] : indptr[row + 1]]
        end = first + count
        seen_from = max(0, first - window + 1) if window else 0
        assert own.tolist() == table[row, seen_from // 16 : -(-end // 16)].tolist()
        # A position is counted from the end: what the list holds ends with the row's last token.
        assert (len(own) - 1) * 16 + last[row] == end - seen_from // 16 * 16


def make_spec(tmp_path: Path) -> ModelSpec:
    make_config("llama").save_pretrained(str(tmp_path))
    return read_spec(tmp_path)


def test_kv_takes_what_others_and_weights_leave_of_a_gpu(tmp_path: Path) -> None:
    spec, engine = make_spec(tmp_path), EngineConfig(device="cuda")
    assert engine.kv_dtype is KVDtype.BFLOAT16
    assert engine.kv_memory_gib is None
    found = device_kv_gib(spec, engine, 79 * GIB, 80 * GIB)
    weights = plan_memory(spec, engine, None, 1.0).weights_bytes
    assert found == pytest.approx(0.9 * 80 - 1 - (weights + WORKING_BYTES) / GIB, abs=0.01)
    plan = plan_memory(spec, engine, None, found)
    assert plan.kv_bytes <= found * GIB < plan.kv_bytes + GIB
    with pytest.raises(ConfigError, match=r"engine.gpu_memory_share 0.9 of 80.0 GiB: nothing is left for KV"):
        device_kv_gib(spec, engine, 9 * GIB, 80 * GIB)
    # Before the GPU is known: room for one text of full length.
    least = plan_memory(spec, engine, None)
    assert max(least.num_blocks) * engine.block_size >= least.max_model_len == spec.max_position
    fixed = EngineConfig(device="cuda", kv_memory_gib=3.0)
    assert plan_memory(spec, fixed, None, found).kv_bytes <= 3 * GIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda", "kv_dtype": "int8"}, "engine.kv_dtype int8: on cuda it is one of bfloat16"),
        ({"device": "cuda", "linear": "int8"}, "engine.linear int8: not on cuda yet"),
        ({"device": "cuda", "attention": "numba"}, "engine.attention numba: on cpu only"),
        ({"device": "cuda", "host_memory_gib": 1.0}, "engine.host_memory_gib: not on cuda yet"),
        ({"kv_dtype": "bfloat16"}, "engine.kv_dtype bfloat16: on cuda only"),
        ({"attention": "flashinfer"}, "engine.attention flashinfer: on cuda only"),
    ],
)
def test_settings_that_a_device_cannot_follow_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.model_validate(settings)
    assert EngineConfig().kv_memory_gib == 1.0
    assert EngineConfig(numerics=NumericsKind.INVARIANT).attention is AttentionKind.AUTO
