"""The engines that engine_throughput compares: ours, transformers' continuous batching, vLLM's CPU build."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.engine_config import EngineConfig, LinearKind
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request, SamplingParams
from pdserve.workers.assembly import assemble_engine


class Contender(Protocol):
    """One engine under test."""

    name: str

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Generate `new_tokens` greedy tokens for each prompt, all submitted at once."""

    def close(self) -> None:
        """Give back what it holds."""


class PdserveContender:
    """Our engine, driven directly, without a prefix cache: repeats send the same prompts."""

    def __init__(self, folder: Path, linear: LinearKind, kv_dtype: KVDtype, threads: int) -> None:
        self.name = f"pdserve {linear}" + (" int8 KV" if kv_dtype is KVDtype.INT8 else "")
        self._round = 0
        config = EngineConfig(linear=linear, kv_dtype=kv_dtype, kv_memory_gib=0.75, prefix_cache=False)
        self._engine = assemble_engine(
            folder, config, max_model_len=None, num_threads=threads, clock=SystemClock()
        ).engine

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """See Contender.run."""
        self._round += 1
        self._engine.runner.bind_thread()
        outputs: dict[str, list[int]] = {}
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            outputs[str(number)] = []
            self._engine.scheduler.add(
                Request(
                    request_id=RequestId(str(number)),
                    attempt=self._round,
                    prompt_token_ids=tuple(prompt),
                    sampling=sampling,
                )
            )
        while self._engine.has_work:
            for delta in self._engine.step():
                outputs[delta.request_id].extend(delta.token_ids)
        return list(outputs.values())

    def close(self) -> None:
        """See Contender.close."""


class TransformersContender:
    """transformers' continuous batching, attention sdpa, fp32: its only exact precision on CPU."""

    name = "transformers CB fp32"

    def __init__(self, folder: Path, threads: int) -> None:
        self._threads = threads
        self._model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """See Contender.run."""
        torch.set_num_threads(self._threads)
        generation = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        with torch.inference_mode():
            results = self._model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
        ordered = sorted(results.values(), key=lambda result: int(str(result.request_id).rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for result in ordered]

    def close(self) -> None:
        """See Contender.close."""


class VllmContender:
    """vLLM's CPU build, eager, in a child process with the Python of its own environment (vllm_child)."""

    def __init__(self, python: str, folder: Path, dtype: str, threads: int, max_model_len: int) -> None:
        self.name = f"vLLM {dtype}"
        child = Path(__file__).with_name("vllm_child.py")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 — closed by close()
        self._process = subprocess.Popen(
            [python, str(child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        setup = {"model": str(folder), "dtype": dtype, "threads": threads, "max_model_len": max_model_len}
        self.version = json.loads(self._ask(setup))["version"]

    def _ask(self, question: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the vLLM child ended with status {status}:\n{self._log.read()[-2000:]}")
        return answer

    def run(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """See Contender.run."""
        outputs: list[list[int]] = json.loads(self._ask({"prompts": prompts, "new_tokens": new_tokens}))
        return outputs

    def close(self) -> None:
        """See Contender.close."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # it has answered everything
        self._process.wait()
        self._log.close()
