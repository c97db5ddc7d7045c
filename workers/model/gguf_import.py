"""Converts a GGUF file into a folder in the Hugging Face layout, once, into the cache.

Matrices are dequantised to fp16 (so the fp16 engine multiplies exactly the stored weights), vectors stay fp32. The
tokenizer is built by transformers from the file's vocabulary. Tensor names and the layout of rotary heads follow
llama.cpp's published converter.
"""

import fcntl
import hashlib
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer, read_gguf_metadata

from pdserve.cluster.base.errors import CheckpointError

Progress = Callable[[str, float], None]
"""Called with a stage and the finished share of it, 0 to 1."""

CONVERTER_VERSION = 2
GEMMA3_LOCAL_THETA = 10000.0

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA3_LAYER_NAMES = {
    **_LAYER_NAMES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CLASSES: dict[str, tuple[type[PretrainedConfig], str]] = {
    "llama": (LlamaConfig, "LlamaForCausalLM"),
    "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
    "gemma3": (Gemma3TextConfig, "Gemma3ForCausalLM"),
}
"""By GGUF architecture: the configuration, and the class that other engines read from config.json."""

Metadata = dict[str, str | int | float | bool]


def import_gguf(path: Path, cache: Path, progress: Progress) -> Path:
    """Return the converted folder of a GGUF file, converting it if the cache does not hold it yet.

    Two processes that ask at once convert once; a half-made folder is never seen. Raises CheckpointError.
    """
    folder = cache / f"{path.stem}-{_file_key(path)}"
    if (folder / "config.json").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{folder.name}.lock"):
        if (folder / "config.json").exists():
            return folder
        partial = cache / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert(path, partial, progress)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(folder)
    return folder


def _file_key(path: Path) -> str:
    """A key of the file's content: its size, its ends, and the version of this converter."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            tail = file.read()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file")
    return hashlib.blake2b(f"{CONVERTER_VERSION}:{size}".encode() + head + tail, digest_size=6).hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock: of two processes that convert at once, the second waits and finds the result."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(path: Path, folder: Path, progress: Progress) -> None:
    progress("reading the file", 0.0)
    try:
        metadata, names = read_gguf_metadata(str(path))
        reader = gguf.GGUFReader(path)
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path}: damaged GGUF: {error}") from error
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _CLASSES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported yet; supported: {', '.join(_CLASSES)}"
        )
    progress("reading the file", 1.0)
    config = _config(path, architecture, metadata, names)
    config.architectures = [_CLASSES[architecture][1]]
    weights = {}
    for number, tensor in enumerate(reader.tensors):
        name, values = _convert_tensor(path, architecture, tensor, config)
        weights[name] = values
        progress("converting weights", (number + 1) / len(reader.tensors))
    progress("building the tokenizer", 0.0)
    tokenizer_kind, tokenizer_fields, tokenizer_config = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(tokenizer_kind, tokenizer_fields)
    tokenizer = _wrap_tokenizer(backend, tokenizer_config)
    progress("building the tokenizer", 1.0)
    progress("writing", 0.0)
    tokenizer.save_pretrained(str(folder))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id).save_pretrained(str(folder))
    config.save_pretrained(str(folder))
    progress("writing", 1.0)


def _wrap_tokenizer(backend: object, settings: dict[str, str | bool | None]) -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    specials = {key: settings[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if settings.get(key)}
    bos = settings.get("bos_token")
    if settings.get("add_bos_token") and isinstance(bos, str):
        bos_id = backend.token_to_id(bos)  # type: ignore[attr-defined]  # tokenizers.Tokenizer ships no such stub
        backend.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    template = settings.get("chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def _config(path: Path, architecture: str, metadata: Metadata, names: tuple[str, ...]) -> PretrainedConfig:
    def need(key: str) -> int | float | str | bool:
        full = f"{architecture}.{key}"
        if full not in metadata:
            raise CheckpointError(f"{path}: metadata {full} is missing")
        return metadata[full]

    if "rope_freqs.weight" in names or f"{architecture}.rope.scaling.type" in metadata:
        raise CheckpointError(
            f"{path}: scaled rotary embeddings in GGUF are not supported yet; use the safetensors folder"
        )
    heads = int(need("attention.head_count"))
    head_dim = int(metadata.get(f"{architecture}.attention.key_length", int(need("embedding_length")) // heads))
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    common = {
        "hidden_size": int(need("embedding_length")),
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get(f"{architecture}.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon")),
        "vocab_size": int(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "output.weight" not in names,
    }
    if architecture == "gemma3":
        return Gemma3TextConfig(
            **common,
            query_pre_attn_scalar=head_dim,
            sliding_window=int(need("attention.sliding_window")),
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA3_LOCAL_THETA},
            },
        )
    has_bias = architecture == "llama" and "blk.0.attn_q.bias" in names
    extra = {"attention_bias": has_bias} if architecture in ("llama", "qwen3") else {}
    return _CLASSES[architecture][0](**common, **extra, rope_parameters={"rope_type": "default", "rope_theta": theta})


def _convert_tensor(
    path: Path, architecture: str, tensor: gguf.ReaderTensor, config: PretrainedConfig
) -> tuple[str, torch.Tensor]:
    name = _name(path, architecture, tensor.name)
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: {tensor.name}: {tensor.tensor_type.name} is not supported yet") from error
    if architecture == "llama" and ".self_attn.q_proj." in name:
        values = _ungroup_rotary(values, config.num_attention_heads)
    if architecture == "llama" and ".self_attn.k_proj." in name:
        values = _ungroup_rotary(values, config.num_key_value_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        values = values - 1.0
    dtype = torch.float16 if values.ndim == 2 else torch.float32
    # A copy: dequantize returns F32 tensors as views of the mapped file, which is closed after the conversion.
    converted = torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
    if not bool(torch.isfinite(converted).all()):
        raise CheckpointError(f"{path}: {tensor.name} holds values outside fp16")
    return name, converted


def _name(path: Path, architecture: str, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    layer_names = _GEMMA3_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{kind}"
    raise CheckpointError(f"{path}: tensor {name} is unknown for architecture {architecture!r}")


def _ungroup_rotary(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary pairs: rows (head, pair, half) → (head, half, pair)."""
    rows = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
