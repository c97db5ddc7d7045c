"""Architectures outside the engine's families, by transformers' code over the paged KV."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    CohereConfig,
    DiffLlamaConfig,
    GenerationConfig,
    GPTNeoConfig,
    GraniteConfig,
    Llama4TextConfig,
    MambaConfig,
    Olmo2Config,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    RobertaConfig,
    StableLmConfig,
)

from pdserve.cluster.base.engine_config import AttentionKind, EngineConfig, LinearKind, RunnerKind
from pdserve.cluster.base.errors import CheckpointError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.memory_plan import plan_memory
from pdserve.workers.model.fallback_spec import read_fallback_spec
from pdserve.workers.model.families import read_spec
from support.checkpoints import make_tokenizer, save_checkpoint
from support.engines import make_engine, make_request, prompts_of, run
from support.oracle import assert_greedy, expected_tokens, oracle
from support.pairs import running_pair, transfer_config
from support.services import generate

LENGTHS = (1, 15, 16, 17, 33, 70)
NUM_TOKENS = 32
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
COMMON = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **TOKENS,
}
ROPE = {"rope_theta": 1e4}
OTHERS = {
    # Norms behind attention; multipliers of everything; a part of each head rotated; parallel layers and scaled logits.
    "olmo2": Olmo2Config(**COMMON),
    "granite": GraniteConfig(**COMMON, attention_multiplier=0.3, logits_scaling=2.0, residual_multiplier=0.8),
    "stablelm": StableLmConfig(**COMMON, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "cohere": CohereConfig(**COMMON, logit_scale=0.5),
    # Windows that only the mask tells of, in every layer and in some; learnt positions.
    "phimoe": PhimoeConfig(**COMMON, num_local_experts=4, sliding_window=32),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=1,
    ),
    "opt": OPTConfig(
        vocab_size=512,
        hidden_size=96,
        word_embed_proj_dim=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        ffn_dim=192,
        max_position_embeddings=512,
        **TOKENS,
    ),
}
ENCODER = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 192,
    **TOKENS,
}


def save_other(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.12 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("name", list(OTHERS))
@pytest.mark.parametrize("attention", [AttentionKind.AUTO, AttentionKind.TORCH])
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str, attention: AttentionKind) -> None:
    folder = save_other(tmp_path / name, OTHERS[name])
    with pytest.raises(CheckpointError, match=r"engine.runner: transformers may run it"):
        read_spec(folder)
    assembled = make_engine(folder, runner=RunnerKind.TRANSFORMERS, attention=attention, max_batch_tokens=64)
    assert assembled.numerics.numerics_class is NumericsClass.TOLERANCE
    assert "engine.runner transformers" in assembled.numerics.note
    prompts, model = prompts_of(LENGTHS), oracle(folder)
    requests = [make_request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)]
    outputs = run(assembled.engine, requests)
    for i, prompt in enumerate(prompts):
        if outputs[str(i)] != expected_tokens(model, prompt, NUM_TOKENS):
            assert_greedy(model, prompt, outputs[str(i)])


def test_a_family_of_our_own_runs_there_too_with_windows_caps_and_sinks(tmp_path: Path) -> None:
    for family in ("gemma2", "gpt_oss"):
        folder = save_checkpoint(tmp_path / family, family)
        spec, own = read_fallback_spec(folder), read_spec(folder)
        assert [group.window for group in spec.groups] == [group.window for group in own.groups]
        assert (spec.attention_softcap, spec.has_sinks) == (own.attention_softcap, own.has_sinks)
        engine = make_engine(folder, runner=RunnerKind.TRANSFORMERS).engine
        prompts, model = prompts_of([90, 33]), oracle(folder)
        outputs = run(engine, [make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)])
        for i, prompt in enumerate(prompts):
            assert_greedy(model, prompt, outputs[str(i)])


async def test_it_hands_its_kv_over_and_draws_and_scores(tmp_path: Path) -> None:
    folder = save_other(tmp_path / "olmo2", OTHERS["olmo2"])
    settings = {"runner": RunnerKind.TRANSFORMERS, "kv_dtype": KVDtype.FLOAT16}
    alone, prefill, decode = (make_engine(folder, **settings) for _ in range(3))
    requests = [
        make_request("greedy", prompts_of([60])[0], max_tokens=12),
        make_request("drawn", prompts_of([40], seed=1)[0], max_tokens=12, temperature=0.8, seed=4),
        make_request("scored", prompts_of([30], seed=2)[0], max_tokens=4, num_prompt_logprobs=1),
    ]
    expected = run(alone.engine, requests)
    async with running_pair(
        transfer_config("shm"),
        prefill=prefill.engine,
        decode=decode.engine,
        stores=(prefill.store, decode.store),
    ) as pair:
        for request in requests:
            assert (await generate(pair.replayer, request))[0] == expected[request.request_id]
        assert pair.decode.load().num_prefilled_tokens == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(vocab_size=512, hidden_size=96, n_layer=2, n_head=6), "do not look attention up|uses"),
        (MambaConfig(vocab_size=512, hidden_size=96, num_hidden_layers=2), "cannot be run"),
        (DiffLlamaConfig(**COMMON), "layer 0 attends twice"),
        (
            GPTNeoConfig(
                vocab_size=512, hidden_size=96, num_layers=2, num_heads=6, attention_types=[[["global", "local"], 1]]
            ),
            "a table of its own",
        ),
        # Who sees what is not what the engine computes.
        (Llama4TextConfig(**COMMON, head_dim=16, attention_chunk_size=16), "depends on more than positions"),
        (Qwen2Config(**COMMON, is_causal=False), "neither causal nor causal within a window"),
        (BertConfig(**ENCODER, is_decoder=False), "neither causal nor causal within a window"),
        # A text would depend on its neighbours.
        (Olmo2Config(**COMMON, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 4.0}), "'dynamic'"),
        (
            GraniteConfig(
                **COMMON,
                rope_parameters={
                    **ROPE,
                    "rope_type": "longrope",
                    "factor": 8.0,
                    "long_factor": [4.0] * 8,
                    "short_factor": [1.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            ),
            "'longrope'",
        ),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(tmp_path: Path, config: PretrainedConfig, message: str) -> None:
    config.save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        read_fallback_spec(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        # Positions that it counts by itself, whatever it is told; positions that begin elsewhere.
        BartConfig(
            vocab_size=512,
            d_model=96,
            decoder_layers=2,
            encoder_layers=2,
            decoder_attention_heads=6,
            encoder_attention_heads=6,
            decoder_ffn_dim=192,
            encoder_ffn_dim=192,
            max_position_embeddings=512,
            is_decoder=True,
            is_encoder_decoder=False,
            **TOKENS,
        ),
        RobertaConfig(**ENCODER, is_decoder=True),
    ],
    ids=["bart", "roberta"],
)
def test_what_it_would_compute_wrongly_is_refused_when_it_is_loaded(tmp_path: Path, config: PretrainedConfig) -> None:
    folder = save_other(tmp_path / "model", config)
    with pytest.raises(CheckpointError, match="texts that are computed together differ"):
        make_engine(folder, runner=RunnerKind.TRANSFORMERS)


def test_the_memory_arithmetic_counts_every_expert(tmp_path: Path) -> None:
    folder = save_other(tmp_path / "moe", OTHERS["qwen2_moe"])
    config = EngineConfig(runner=RunnerKind.TRANSFORMERS, linear=LinearKind.FP32, kv_memory_gib=0.02)
    plan = plan_memory(read_fallback_spec(folder), config, None)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 — no mapping
    assert plan.weights_bytes + plan.embedding_bytes == 4 * stored


def test_settings_that_it_does_not_follow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine.tensor_parallel: engine.runner transformers"):
        EngineConfig(runner=RunnerKind.TRANSFORMERS, tensor_parallel=2, linear=LinearKind.FP32)
    with pytest.raises(ValueError, match=r"engine.linear: engine.runner transformers"):
        EngineConfig(runner=RunnerKind.TRANSFORMERS)
