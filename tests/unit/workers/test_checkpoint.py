"""Checkpoints that cannot be used are refused with the part that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdserve.cluster.base.engine_config import AttentionKind, EngineConfig, LinearKind
from pdserve.cluster.base.errors import CheckpointError, ConfigError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.workers.machine import available_memory_bytes
from pdserve.workers.memory_plan import check_memory, plan_memory
from pdserve.workers.model.checkpoint import Checkpoint
from pdserve.workers.model.families import read_spec
from pdserve.workers.model.loader import load_model
from pdserve.workers.model.rope import position_tables
from pdserve.workers.model.source import default_name, prepare_model
from support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_config, save_checkpoint

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [2.0 + 0.5 * place for place in range(8)],
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", "qwen2")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path) -> None:
    load_model(
        folder,
        linear=LinearKind.FP32,
        attention=AttentionKind.NUMBA,
        device=torch.device("cpu"),
        max_model_len=64,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is none of the engine's own families .llama, mistral, qwen2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "phimoe"}, "model_type 'phimoe' is none of the engine's own families .*engine.runner"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"is_causal": False}, "is_causal false"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_configurations_outside_the_families_are_refused_by_name(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_spec(folder)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 4 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok 0 of"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(
    shared_checkpoints: Callable[[str], Path], tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    config = json.loads((shared_checkpoints(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "phi3", "mixtral"])
def test_a_bias_that_transformers_ignores_is_ignored(
    shared_checkpoints: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    config = json.loads((shared_checkpoints(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True, "mlp_bias": True}))
    spec = read_spec(tmp_path)
    assert (spec.has_qkv_bias, spec.has_o_bias, spec.has_mlp_bias) == (False, False, False)


def test_a_missing_or_broken_config_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        read_spec(folder)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_spec(tmp_path)


def test_missing_misshapen_and_quantised_tensors_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.2.mlp.down_proj.weight"
    for changed, message in (
        (None, f"tensor {name} is missing"),
        (torch.zeros(3, 3), rf"tensor {name} is \(3, 3\), config.json implies \(96, 192\)"),
        (torch.zeros(96, 192, dtype=torch.int8), "quantised weights are not supported yet"),
    ):
        kept = {key: value for key, value in weights.items() if key != name}
        save_file(kept if changed is None else {**kept, name: changed}, path)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_files_that_are_no_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(CheckpointError, match="outside the folder"):
        Checkpoint(folder)


def test_the_digest_follows_weights_and_configuration(folder: Path, tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        checkpoint = Checkpoint(path)
        found = checkpoint.digest()
        checkpoint.close()
        return found

    first = digest(folder)
    assert digest(save_checkpoint(tmp_path / "copy", "qwen2")) == first
    assert digest(save_checkpoint(tmp_path / "other", "qwen2", seed=1)) != first
    edit_config(folder, rms_norm_eps=1e-5)
    assert digest(folder) != first


def test_memory_that_cannot_hold_is_refused_with_the_arithmetic(folder: Path) -> None:
    spec = read_spec(folder)
    with pytest.raises(ConfigError, match=r"engine.kv_memory_gib 1e-05: holds 0 blocks"):
        plan_memory(spec, EngineConfig(kv_memory_gib=1e-5), None)
    with pytest.raises(ConfigError, match=r"model.max_model_len 5000: the model .* 1024 tokens|allows 1024 tokens"):
        plan_memory(spec, EngineConfig(kv_memory_gib=0.1), 5000)
    plan = plan_memory(spec, EngineConfig(kv_memory_gib=0.01), None)
    assert plan.max_model_len == min(1024, max(plan.num_blocks) * 16)
    small = plan_memory(spec, EngineConfig(kv_memory_gib=0.01, kv_dtype=KVDtype.INT8), None)
    row_bytes = KVDtype.INT8.row_bytes(spec.head_dim)
    assert max(small.num_blocks) / max(plan.num_blocks) == pytest.approx(4 * spec.head_dim / row_bytes, rel=0.01)
    with pytest.raises(ConfigError, match=r"packed weights .* KV .* 3 worker\(s\) need"):
        check_memory([plan] * 3, plan.total_bytes * 3 - 1)
    check_memory([plan] * 3, plan.total_bytes * 3)
    assert available_memory_bytes() > 0


def test_models_are_found_by_folder_and_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def progress(stage: str, share: float) -> None:
        raise AssertionError("nothing to convert")

    assert prepare_model(str(folder), tmp_path, progress) == folder.resolve()
    assert default_name(str(folder), folder) == "model"
    assert default_name("demo", folder) == "gemma-3-270m"
    with pytest.raises(CheckpointError, match="no such folder or file"):
        prepare_model("some-model", tmp_path, progress)
    with pytest.raises(CheckpointError, match="is no hub id"):
        prepare_model(str(folder), tmp_path, progress, "main")
    with pytest.raises(CheckpointError, match="neither a folder"):
        prepare_model(str(tmp_path), tmp_path, progress)
    (tmp_path / "fake.gguf").write_bytes(b"nope")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        prepare_model(str(tmp_path / "fake.gguf"), tmp_path, progress)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5000.0}),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
        ("llama", LLAMA3_ROPE),
        ("llama", YARN_ROPE),
        ("qwen2", {**YARN_ROPE, "attention_factor": 1.3}),
        ("phi3", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("phi3", LONG_ROPE),
    ],
)
@pytest.mark.parametrize("length", [32, 64, 200])
def test_rotations_equal_transformers(tmp_path: Path, family: str, parameters: dict[str, object], length: int) -> None:
    config = make_config(family, rope_parameters=parameters)
    config.save_pretrained(str(tmp_path))
    rope = read_spec(tmp_path).ropes[0]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).model
    rotary = type(model.rotary_emb)(config)
    cos, sin = rotary(torch.zeros(1, length, 1), torch.arange(length)[None])
    found_cos, found_sin = position_tables(rope, length, length)
    half = rope.rotary_dim // 2
    torch.testing.assert_close(found_cos, cos[0, :, :half], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_sin, sin[0, :, :half], rtol=1e-5, atol=1e-5)
