"""Correctness and speed of the engine on one CUDA device; runs on a CPU too, with less. No network.

    python -m pdserve.benchmarks.gpu_check [--device cuda] [--minutes 7]

1. *backends*: every attention backend on the shapes of real families, against the reference in fp32.
2. *families*: greedy tokens of a small random model of each beside transformers' (fp32, CPU), alone and in a batch.
3. *invariant*: `engine.numerics: invariant` gives a row the same bits alone and in a batch (the worker's self-test).
4. *graphs*: CUDA graphs on and off say the same tokens; what a decode step takes.
5. *hand-off*: a prefill and a decode process on the one GPU say what one engine says, over shared memory.
6. *speed*: output tokens a second at N = 1, 8, 32 beside transformers' static batch, and of N = 1 the share of what the
   memory's bandwidth allows.

Prints a table and one JSON line; exits 1 if a check failed. Parts that there is no time for are named as left out.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pdserve.benchmarks.gpu_models import (
    FAMILIES,
    LARGE,
    SMALL,
    generate,
    make_engine,
    save_random,
    seconds_of,
    worst_margin,
)
from pdserve.benchmarks.handoff_workers import make_request, run_to_end
from pdserve.benchmarks.local_cluster import WorkerPlan, running_cluster
from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.engine_config import AttentionKind, LinearKind, NumericsKind
from pdserve.cluster.base.errors import ConfigError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.attention.choice import AttentionShape, choose_attention
from pdserve.workers.engine.engine import Engine
from pdserve.workers.kv.store import KVStore

Row = dict[str, object]

TIES = {"cpu": 1e-3, "cuda": 0.25}
"""How far below the largest logit a greedy token may be: CUDA has weights and KV in bf16; logits spread by about 2."""
PROMPT_TOKENS, NEW_TOKENS = 128, 64


def check_backends(device: str) -> list[Row]:
    """Run each backend's self-test on shapes of real families."""
    if device == "cpu":
        return []
    shapes = {
        "llama-8b": AttentionShape(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            block_size=16,
            kv_dtype=KVDtype.BFLOAT16,
            windows=(0,),
            softcap=0.0,
            has_sinks=False,
        ),
        "gemma2-9b": AttentionShape(
            num_heads=16,
            num_kv_heads=8,
            head_dim=256,
            block_size=16,
            kv_dtype=KVDtype.BFLOAT16,
            windows=(0, 48),
            softcap=50.0,
            has_sinks=False,
        ),
        "gpt-oss": AttentionShape(
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            block_size=16,
            kv_dtype=KVDtype.BFLOAT16,
            windows=(0, 48),
            softcap=0.0,
            has_sinks=True,
        ),
        "fp8 KV": AttentionShape(
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            block_size=32,
            kv_dtype=KVDtype.FLOAT8,
            windows=(0,),
            softcap=0.0,
            has_sinks=False,
        ),
    }
    kinds = (AttentionKind.FLASHINFER, AttentionKind.VARLEN, AttentionKind.TRITON, AttentionKind.TORCH)
    rows: list[Row] = []
    for name, shape in shapes.items():
        for kind in kinds:
            fault = _fault(kind, torch.device(device), shape)
            rows.append({"shape": name, "backend": kind.value, "fault": fault or ""})
        chosen = choose_attention(AttentionKind.AUTO, torch.device(device), shape).kind
        rows.append({"shape": name, "backend": f"auto = {chosen}", "fault": ""})
    return rows


def _fault(kind: AttentionKind, device: torch.device, shape: AttentionShape) -> str | None:
    try:
        choose_attention(kind, device, shape)
    except ConfigError as error:
        return str(error).partition(f"attention {kind}: ")[2] or str(error)
    return None


def check_families(root: Path, device: str) -> list[Row]:
    """Compare each family with the oracle, alone and in a batch."""
    rows: list[Row] = []
    for family in FAMILIES:
        model = save_random(root / family, family, SMALL)
        linear = LinearKind.FP32 if device == "cpu" else LinearKind.FP16
        assembled = make_engine(root / family, device, linear=linear)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(10, 512, length).tolist() for length in (1, 16, 17, 60, 130)]
        together = generate(assembled, prompts, 32, 0)
        alone = [generate(assembled, [prompt], 32, 1)[0] for prompt in prompts]
        margins = [
            worst_margin(model, prompt, tokens) for prompt, tokens in zip(prompts * 2, together + alone, strict=True)
        ]
        is_right = max(margins) <= TIES[device] and assembled.engine.pool.is_all_free
        attention = assembled.model.attention.value
        rows.append(
            {"family": family, "attention": attention, "worst_margin": round(max(margins), 5), "passed": is_right}
        )
    return rows


def check_invariant(root: Path, device: str) -> Row:
    """Ask the self-test of a worker whether a row's bits depend on its batch."""
    numerics = make_engine(root / "qwen3", device, numerics=NumericsKind.INVARIANT).numerics
    return {"numerics_class": numerics.numerics_class.value, "note": numerics.note}


def check_graphs(root: Path, device: str) -> list[Row]:
    """Compare decode steps with and without graphs: tokens, and seconds a token."""
    rng = np.random.default_rng(2)
    engines = {has: make_engine(root / "large", device, cuda_graphs=has, attention="triton") for has in (True, False)}
    rows: list[Row] = []
    for batch in (1, 8, 32):
        prompts = [rng.integers(10, 32000, 16).tolist() for _ in range(batch)]
        texts = {has: generate(engine, prompts, 16, batch) for has, engine in engines.items()}
        steps = {
            has: seconds_of(partial(generate, engine, prompts, NEW_TOKENS, 1000 + batch), 3) / NEW_TOKENS
            for has, engine in engines.items()
        }
        rows.append(
            {
                "n": batch,
                "step_ms": round(1000 * steps[True], 2),
                "step_ms_without": round(1000 * steps[False], 2),
                "passed": texts[True] == texts[False],
            }
        )
    return rows


def _handoff_engine(folder: Path, device: str) -> tuple[Engine, KVStore]:
    assembled = make_engine(folder, device)
    return assembled.engine, assembled.store


async def _run_apart(folder: Path, device: str, requests: list[Request]) -> tuple[list[list[int]], float]:
    """Run requests through a prefill and a decode process; return their tokens, and prompt tokens a second."""
    plans = [
        WorkerPlan(role=role, make_engine=partial(_handoff_engine, folder, device), core=core)
        for core, role in enumerate((Role.PREFILL, Role.DECODE))
    ]
    transfer = TransferConfig(transports=(TransportKind.SHM,), promised_share=1.0)
    async with running_cluster(plans, transfer) as cluster:
        await run_to_end(cluster, replace(requests[0], request_id=RequestId("warm")))
        start = time.perf_counter()
        outputs = await asyncio.gather(*(run_to_end(cluster, request) for request in requests))
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return outputs, num_tokens / (time.perf_counter() - start)


def check_handoff(root: Path, device: str) -> Row:
    """Hand KV over between two processes on the one device; the tokens are checked against transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(str(root / "large"), dtype=torch.float32).eval()
    vocab = range(10, model.config.vocab_size)
    requests = [make_request(f"r{number}", 512, 8, vocab) for number in range(8)]
    outputs, rate = asyncio.run(_run_apart(root / "large", device, requests))
    margins = [
        worst_margin(model, list(request.prompt_token_ids), tokens)
        for request, tokens in zip(requests, outputs, strict=True)
    ]
    is_right = max(margins) <= TIES[device] and all(len(tokens) == 8 for tokens in outputs)
    return {"prompt_tokens_per_s": round(rate, 1), "worst_margin": round(max(margins), 5), "passed": is_right}


def read_bandwidth(device: str) -> float:
    """Return bytes a second that a copy within the device's memory reads."""
    source = torch.zeros(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    # A copy reads and writes as much.
    return 2 * source.numel() / seconds_of(copy, 5)


def check_speed(root: Path, device: str, deadline: float) -> list[Row]:
    """Measure output tokens per second beside transformers' static batch, interleaved."""
    peer = save_random(root / "large", "qwen3", LARGE if device == "cuda" else SMALL)
    vocab_size = peer.config.vocab_size
    num_bytes = 2 * sum(parameter.numel() for parameter in peer.parameters())
    peer = peer.to(torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32)
    limit = read_bandwidth(device) / num_bytes
    assembled = make_engine(root / "large", device)
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for batch in (1, 8, 32):
        prompts = [rng.integers(10, vocab_size, PROMPT_TOKENS).tolist() for _ in range(batch)]
        ids = torch.tensor(prompts, device=device)

        def run_peer(ids: torch.Tensor = ids) -> None:
            with torch.inference_mode():
                peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )

        runs: dict[str, Callable[[], object]] = {
            "pdserve": partial(generate, assembled, prompts, NEW_TOKENS, 100 + batch),
            "transformers": run_peer,
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(3):
            for name, run in runs.items():
                seconds[name].append(seconds_of(run, 1))
            if time.monotonic() > deadline:
                break
        rates = {name: batch * NEW_TOKENS / sorted(found)[len(found) // 2] for name, found in seconds.items()}
        row: Row = {"n": batch, **{name: round(rate, 1) for name, rate in rates.items()}}
        row["ratio"] = round(rates["pdserve"] / rates["transformers"], 2)
        if batch == 1:
            row["of_bandwidth"] = round(rates["pdserve"] / limit, 3)
        rows.append(row)
        if time.monotonic() > deadline:
            break
    return rows


def main(arguments: list[str]) -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no further part after this long")
    options = parser.parse_args(arguments)
    device = options.device
    deadline = time.monotonic() + 60 * options.minutes
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"device {device}: {name}, torch {torch.__version__}")
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        parts: dict[str, Callable[[], object]] = {
            "backends": partial(check_backends, device),
            "families": partial(check_families, root, device),
            "invariant": partial(check_invariant, root, device),
            "speed": partial(check_speed, root, device, deadline),
            "handoff": partial(check_handoff, root, device),
        }
        if device == "cuda":
            parts["graphs"] = partial(check_graphs, root, device)
        for part, run in parts.items():
            if time.monotonic() > deadline:
                results[part] = "left out: no time"
                continue
            try:
                results[part] = run()
            except Exception as error:  # noqa: BLE001 — a part that fails does not cost what the others measure
                results[part] = f"failed: {type(error).__name__}: {error}"
            _show(part, results[part])
    print(json.dumps({"benchmark": "gpu_check", "device": name, **results}))
    return int(not all(_has_passed(result) for result in results.values()))


def _show(part: str, result: object) -> None:
    for row in result if isinstance(result, list) else [result]:
        text = "  ".join(f"{key} {value}" for key, value in row.items()) if isinstance(row, dict) else row
        print(f"{part:10} {text}", flush=True)


def _has_passed(result: object) -> bool:
    if isinstance(result, str):
        return not result.startswith("failed")
    rows = result if isinstance(result, list) else [result]
    return all(row.get("passed", True) for row in rows if isinstance(row, dict))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
