"""Runs vLLM's CPU build for engine_throughput, in an environment of its own: a child that reads and writes JSON lines.

Not part of pdserve: the Python of that environment runs this file by its path. The first line it reads is the setup,
each later one a list of prompts; it answers each with one line, on the stream that was its standard output.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes to standard error
    setup = json.loads(sys.stdin.readline())
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(setup["threads"]),
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[: setup["threads"]]),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    import vllm  # type: ignore[import-not-found]  # lives in the child's environment only

    llm: Any = vllm.LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=setup["max_model_len"],
        max_num_seqs=64,
        disable_log_stats=True,
    )
    answers.write(json.dumps({"version": vllm.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        answers.write(json.dumps([list(output.outputs[0].token_ids) for output in outputs]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
