"""Correctness and speed of the engine on one CUDA device with the torch backend; runs on CPU too. No network.

    python -m pdserve.benchmarks.gpu_check [--device cuda] [--minutes 4]

1. Greedy tokens of a small random model of each family equal transformers fp32 on the CPU (ties within 1e-3).
   The tokens are those of a batch and of each request alone.
2. Output tokens per second of a larger random model at N = 1, 8, 32, beside transformers' `generate` with a static
   batch on the same device, interleaved.

Prints a table and one JSON line; exits 1 if a check failed.

Models are random and made on the spot: real weights would need a network.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import AttentionKind, EngineConfig, LinearKind
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import AssembledEngine, assemble_engine

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
TIE = 1e-3
PROMPT_TOKENS, NEW_TOKENS = 128, 64


def save_random(folder: Path, family: str, *, large: bool) -> PreTrainedModel:
    """Write a random checkpoint and return its fp32 model on the CPU."""
    config_type, model_type = FAMILIES[family]
    sizes = {
        "vocab_size": 32000 if large else 512,
        "hidden_size": 1024 if large else 96,
        "intermediate_size": 3072 if large else 192,
        "num_hidden_layers": 16 if large else 4,
        "num_attention_heads": 16 if large else 6,
        "num_key_value_heads": 8 if large else 2,
        "head_dim": 64 if large else 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    extra = {"sliding_window": 40, "query_pre_attn_scalar": sizes["head_dim"]} if family == "gemma3" else {}
    torch.manual_seed(0)
    model = model_type(config_type(**sizes, **extra))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_((torch.randn_like(parameter) * (0.03 if large else 0.12)).bfloat16().float())
    model.save_pretrained(str(folder))
    return model.eval()


def make_engine(folder: Path, device: str, linear: LinearKind) -> AssembledEngine:
    """Return an engine with the torch backend."""
    config = EngineConfig(
        device=device, linear=linear, attention=AttentionKind.TORCH, kv_memory_gib=1.0, max_batch_tokens=2048
    )
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
    while engine.scheduler.has_work:
        for delta in engine.step():
            outputs[delta.request_id].extend(delta.token_ids)
    return list(outputs.values())


def worst_margin(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Return how far a token was at worst below the oracle's largest logit."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).max())


def check_family(root: Path, family: str, device: str) -> dict[str, object]:
    """Compare a family with the oracle, alone and in a batch."""
    folder = root / family
    model = save_random(folder, family, large=False)
    assembled = make_engine(folder, device, LinearKind.FP32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 512, length).tolist() for length in (1, 16, 17, 60, 130)]
    together = generate(assembled, prompts, NEW_TOKENS, 0)
    alone = [generate(assembled, [prompt], NEW_TOKENS, 1)[0] for prompt in prompts]
    margins = [
        worst_margin(model, prompt, tokens) for prompt, tokens in zip(prompts * 2, together + alone, strict=True)
    ]
    is_free = assembled.engine.pool.is_all_free
    return {"family": family, "worst_margin": round(max(margins), 6), "passed": max(margins) <= TIE and is_free}


def check_speed(root: Path, device: str, deadline: float) -> list[dict[str, object]]:
    """Measure output tokens per second beside transformers' static batch, interleaved."""
    folder = root / "large"
    peer = save_random(folder, "qwen3", large=True).to(
        torch.device(device), torch.bfloat16 if device != "cpu" else None
    )
    assembled = make_engine(folder, device, LinearKind.FP16)
    rng = np.random.default_rng(1)
    rows: list[dict[str, object]] = []
    for batch in (1, 8, 32):
        prompts = [rng.integers(10, 32000, PROMPT_TOKENS).tolist() for _ in range(batch)]
        ours: list[float] = []
        theirs: list[float] = []
        for repeat in range(3):
            start = time.perf_counter()
            generate(assembled, prompts, NEW_TOKENS, 100 + repeat)
            ours.append(batch * NEW_TOKENS / (time.perf_counter() - start))
            start = time.perf_counter()
            ids = torch.tensor(prompts, device=device)
            with torch.inference_mode():
                peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )
            theirs.append(batch * NEW_TOKENS / (time.perf_counter() - start))
            if time.monotonic() > deadline:
                break
        row = {"n": batch, "pdserve": statistics.median(ours), "transformers": statistics.median(theirs)}
        rows.append({**row, "ratio": row["pdserve"] / row["transformers"], "repeats": len(ours)})
        if time.monotonic() > deadline:
            break
    return rows


def main(arguments: list[str]) -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop measuring speed after this long")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(f"device {options.device}: {name}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        families = [check_family(root, family, options.device) for family in FAMILIES]
        for family in families:
            print(f"{family['family']:8} worst margin {family['worst_margin']:<10} passed {family['passed']}")
        rows = check_speed(root, options.device, deadline)
    for row in rows:
        print(
            f"N={row['n']:<3} pdserve {row['pdserve']:8.1f}  "
            f"transformers {row['transformers']:8.1f}  x{row['ratio']:.2f}"
        )
    print(json.dumps({"benchmark": "gpu_check", "device": name, "families": families, "rows": rows}))
    return int(not all(family["passed"] for family in families))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
