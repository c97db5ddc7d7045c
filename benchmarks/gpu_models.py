"""Random models of each family, made on the spot, and engines on them: what gpu_check and soak run. No network."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig, LinearKind
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import AssembledEngine, assemble_engine

WINDOW: dict[str, object] = {"sliding_window": 40}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, {**WINDOW, "attn_logit_softcapping": 20.0}),
    "gemma3": (Gemma3TextConfig, WINDOW),
    "qwen3_moe": (Qwen3MoeConfig, {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    "gpt_oss": (GptOssConfig, {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
"""About 1.3 billion weights: a decode of one text is bound by reading them."""


def save_random(folder: Path, family: str, sizes: dict[str, int]) -> PreTrainedModel:
    """Write a random checkpoint and return its fp32 model on the CPU."""
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes, **own, bos_token_id=0, eos_token_id=1))
    spread = 0.12 if sizes is SMALL else 0.03
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_((torch.randn_like(parameter) * spread).bfloat16().float())
    model.save_pretrained(str(folder))
    return model.eval()


def make_engine(folder: Path, device: str, **settings: object) -> AssembledEngine:
    """Return an engine on a checkpoint."""
    plain: dict[str, object] = {
        "device": device,
        "linear": LinearKind.FP16,
        "kv_memory_gib": 1.0,
        "max_batch_tokens": 2048,
        "max_running": 64,
        "prefix_cache": False,
    }
    config = EngineConfig.model_validate({**plain, **settings})
    threads = torch.get_num_threads()
    return assemble_engine(folder, config, max_model_len=1024, num_threads=threads, clock=SystemClock())


def generate(assembled: AssembledEngine, prompts: list[list[int]], new_tokens: int, attempt: int) -> list[list[int]]:
    """Run greedy requests together."""
    engine = assembled.engine
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.scheduler.add(
            Request(
                request_id=RequestId(str(number)), attempt=attempt, prompt_token_ids=tuple(prompt), sampling=sampling
            )
        )
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id].extend(delta.token_ids)
    return list(outputs.values())


def worst_margin(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Return how far a token was at worst below the oracle's largest logit."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).max())


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call."""
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
