"""GGUF files written by the gguf library convert to the checkpoint they were made from."""

import json
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from pdserve.cluster.base.errors import CheckpointError
from pdserve.workers.model.gguf_import import import_gguf
from support.checkpoints import make_config, make_model, make_tokenizer
from support.engines import make_engine, make_request, prompts_of, run

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA3_NAMES = {
    **NAMES,
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(family: str, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{(GEMMA3_NAMES if family == 'gemma3' else NAMES)[rest]}.{kind}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(path: Path, family: str, model: PreTrainedModel) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    tokenizer = make_tokenizer()
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens = known + [f"[PAD{number}]" for number in range(len(known), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(tokens))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if family == "llama" and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1.0
        writer.add_tensor(gguf_name(family, name), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_source(family: str) -> PreTrainedModel:
    config = make_config(family)
    if family == "llama":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "gemma3":
        # GGUF states no layer types: the sixth of each six layers has full attention.
        config.num_hidden_layers = 6
        config.layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    return make_model(config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_converted_file_generates_what_its_source_does(tmp_path: Path, family: str) -> None:
    model = make_source(family)
    path = tmp_path / f"{family}.gguf"
    write_gguf(path, family, model)
    stages: list[str] = []
    folder = import_gguf(path, tmp_path / "cache", lambda stage, share: stages.append(stage))
    assert {"reading the file", "converting weights", "building the tokenizer", "writing"} == set(stages)
    prompts = prompts_of((3, 20, 55))
    outputs = run(make_engine(folder).engine, [make_request(str(n), p, max_tokens=24) for n, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        tokens = outputs[str(number)]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        margins = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert margins.max() < 1e-4
    converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    text = "The quick brown fox; naïve café."
    assert converted(text, add_special_tokens=False).input_ids == make_tokenizer()(text).input_ids
    assert converted(text).input_ids[0] == 0


def test_two_at_once_convert_once_and_a_second_time_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2", make_source("qwen2"))
    conversions: list[str] = []
    folders: list[Path] = []

    def convert() -> None:
        folders.append(import_gguf(path, tmp_path / "cache", lambda stage, share: conversions.append(stage)))

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert conversions.count("writing") == 2  # its begin and its end
    convert()
    assert conversions.count("writing") == 2


def test_unknown_architectures_and_damaged_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.add_context_length(5)
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not supported yet"):
        import_gguf(tmp_path / "x.gguf", tmp_path / "cache", lambda stage, share: None)
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "qwen2", make_source("qwen2"))
    cut = tmp_path / "cut.gguf"
    content = whole.read_bytes()
    for size in (10, 100, 3000, len(content) // 2, len(content) - 40000):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            import_gguf(cut, tmp_path / "cache", lambda stage, share: None)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
