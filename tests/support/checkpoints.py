"""Tiny random checkpoints of each family, and a small tokenizer trained on the spot. Nothing comes from a hub."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Prefill and decode run on separate workers; blocks stream between them.",
    "Żółć, naïve café, 東京, Привет, and emoji 🫠 👨‍👩‍👧 too.",
] * 20


def make_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with BOS and EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make_config(family: str, *, odd: bool = False, vocab_size: int = 512) -> PretrainedConfig:
    """Return a tiny configuration; `odd` takes widths that are no multiple of a vector."""
    common = {
        "vocab_size": vocab_size,
        "hidden_size": 90 if odd else 96,
        "intermediate_size": 150 if odd else 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 18 if odd else 32,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if family == "llama":
        return LlamaConfig(
            **common,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    if family == "qwen2":
        return Qwen2Config(**common, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**common, tie_word_embeddings=True)
    return Gemma3TextConfig(
        **common,
        sliding_window=40,
        query_pre_attn_scalar=common["head_dim"],
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )


_MODELS = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "gemma3": Gemma3ForCausalLM,
}


def make_model(config: PretrainedConfig, family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random fp32 model whose weights are exact in bf16 and fp16, with every parameter in play."""
    torch.manual_seed(seed)
    model = _MODELS[family](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                noise = 0.2 * torch.randn_like(parameter)
                parameter.copy_((noise + (0.0 if family == "gemma3" else 1.0)).bfloat16().float())
            else:
                parameter.copy_((0.12 * torch.randn_like(parameter)).bfloat16().float())
    return model.eval()


def save_checkpoint(folder: Path, family: str, *, odd: bool = False, shards: bool = False, seed: int = 0) -> Path:
    """Write a tiny checkpoint with its tokenizer; `shards` splits the weights over several files."""
    model = make_model(make_config(family, odd=odd), family, seed)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(str(folder), max_shard_size="200KB" if shards else "5GB")
    make_tokenizer().save_pretrained(str(folder))
    return folder
