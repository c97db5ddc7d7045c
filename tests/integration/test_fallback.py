"""Architectures outside the engine's families, by transformers' code over the paged KV."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    GenerationConfig,
    GraniteConfig,
    MambaConfig,
    Olmo2Config,
    PretrainedConfig,
    StableLmConfig,
)

from pdserve.cluster.base.config import AttentionKind, EngineConfig, LinearKind, RunnerKind
from pdserve.cluster.base.errors import CheckpointError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.worker_info import NumericsClass
from pdserve.workers.model.fallback import read_fallback_spec
from pdserve.workers.model.families import read_spec
from support.checkpoints import make_tokenizer, save_checkpoint
from support.engines import make_engine, make_request, prompts_of, run
from support.oracle import assert_greedy, expected_tokens, oracle
from support.pairs import running_pair, transfer_config
from support.services import generate

LENGTHS = (1, 15, 16, 17, 33, 70)
NUM_TOKENS = 32
COMMON = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
OTHERS = {
    # Norms behind attention; multipliers of everything; a part of each head rotated; parallel layers and scaled logits.
    "olmo2": Olmo2Config(**COMMON),
    "granite": GraniteConfig(**COMMON, attention_multiplier=0.3, logits_scaling=2.0, residual_multiplier=0.8),
    "stablelm": StableLmConfig(**COMMON, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "cohere": CohereConfig(**COMMON, logit_scale=0.5),
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
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(tmp_path: Path, config: PretrainedConfig, message: str) -> None:
    config.save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        read_fallback_spec(tmp_path)


def test_settings_that_it_does_not_follow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine.tensor_parallel: engine.runner transformers"):
        EngineConfig(runner=RunnerKind.TRANSFORMERS, tensor_parallel=2, linear=LinearKind.FP32)
    with pytest.raises(ValueError, match=r"engine.linear: engine.runner transformers"):
        EngineConfig(runner=RunnerKind.TRANSFORMERS)
