"""Tiny random checkpoints of each family, and a small tokenizer trained on the spot. Nothing comes from a hub."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)
SHARED_KV_HEADS = {"llama": 4, "qwen3": 4, "gemma3": 1}
"""KV heads of checkpoints for several ranks, 2 for families not named: sharded and replicated ones."""
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


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
MIXED_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def make_config(
    family: str, *, odd: bool = False, vocab_size: int = 512, is_shared: bool = False, **changes: object
) -> PretrainedConfig:
    """Return a tiny configuration; `odd` takes widths that are no multiple of a vector.

    `is_shared` takes heads that 2 and 4 ranks can share.
    """
    common: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 90 if odd else 96,
        "intermediate_size": 150 if odd else 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 8 if is_shared else 6,
        "num_key_value_heads": SHARED_KV_HEADS.get(family, 2) if is_shared else 2,
        "head_dim": 18 if odd else 32,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    is_tied = {"tie_word_embeddings": True}
    kind, own = {
        "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
        "mistral": (MistralConfig, {"sliding_window": 40}),
        "qwen2": (Qwen2Config, is_tied),
        "qwen3": (Qwen3Config, is_tied),
        "gemma2": (
            Gemma2Config,
            # Caps that the scores of a random model meet.
            {
                "sliding_window": 40,
                "query_pre_attn_scalar": 24,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 5.0,
                "layer_types": MIXED_WINDOWS,
            },
        ),
        "gemma3": (
            Gemma3TextConfig,
            {"sliding_window": 40, "query_pre_attn_scalar": common["head_dim"], "layer_types": MIXED_WINDOWS},
        ),
        # Its heads share the hidden size.
        "phi3": (
            Phi3Config,
            {
                "head_dim": 12 if is_shared else 16,
                "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75 if not is_shared else 0.5},
            },
        ),
        "mixtral": (MixtralConfig, {"num_local_experts": 4}),
        "qwen3_moe": (
            Qwen3MoeConfig,
            {
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
            },
        ),
        "gpt_oss": (
            GptOssConfig,
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 40,
                "layer_types": MIXED_WINDOWS,
                "rope_parameters": {**YARN_ROPE, "truncate": False},
            },
        ),
    }[family]
    return kind(**{**common, **own, **changes})


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random fp32 model whose weights are exact in bf16 and fp16, with every parameter in play."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    norm_mean = 0.0 if config.model_type in ("gemma2", "gemma3_text") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_((0.2 * torch.randn_like(parameter) + norm_mean).bfloat16().float())
            else:
                parameter.copy_((0.12 * torch.randn_like(parameter)).bfloat16().float())
    return model.eval()


def save_checkpoint(
    folder: Path, family: str, *, odd: bool = False, shards: bool = False, seed: int = 0, **changes: object
) -> Path:
    """Write a tiny checkpoint with its tokenizer; `shards` splits the weights over several files."""
    model = make_model(make_config(family, odd=odd, **changes), seed)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(str(folder), max_shard_size="200KB" if shards else "5GB")
    make_tokenizer().save_pretrained(str(folder))
    return folder
