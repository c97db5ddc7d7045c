"""Engines for tests: assembled on tiny checkpoints, or on the digest model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.cluster.base.clock import Clock, ManualClock
from pdserve.cluster.base.engine_config import AttentionKind, EngineConfig, LinearKind
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import FinishReason, Request, SamplingParams, forks_of
from pdserve.workers.assembly import AssembledEngine, assemble_engine
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.rank_step import Followers
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.strategies import Strategy
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.model.digest import DigestModel, DigestRunner
from pdserve.workers.model.parallel import SOLO, RankGroup


def make_engine(
    folder: Path,
    *,
    linear: LinearKind = LinearKind.FP32,
    kv_dtype: KVDtype = KVDtype.FLOAT32,
    attention: AttentionKind = AttentionKind.NUMBA,
    block_size: int = 16,
    max_batch_tokens: int = 512,
    max_running: int = 64,
    threads: int = 1,
    kv_memory_gib: float = 0.02,
    group: RankGroup = SOLO,
    followers: Followers | None = None,
    **changes: object,
) -> AssembledEngine:
    """Return an engine on a checkpoint."""
    config = EngineConfig(
        tensor_parallel=group.size,
        linear=linear,
        kv_dtype=kv_dtype,
        attention=attention,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        kv_memory_gib=kv_memory_gib,
        **changes,  # type: ignore[arg-type]
    )
    return assemble_engine(
        folder,
        config,
        max_model_len=None,
        num_threads=threads,
        clock=ManualClock(),
        group=group,
        followers=followers,
    )


def make_digest_engine(
    model: DigestModel,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_running: int = 16,
    max_batch_tokens: int = 64,
    max_waiting: int = 256,
    has_prefix_cache: bool = True,
    clock: Clock | None = None,
    strategy: Strategy | None = None,
    host_blocks: int = 0,
    **settings_changes: object,
) -> Engine:
    """Return an engine on the digest model."""
    settings = SchedulerSettings(
        block_size=block_size,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_waiting,
        max_model_len=num_blocks * block_size,
        vocab_size=model.vocab_size,
        has_prefix_cache=has_prefix_cache,
        **settings_changes,  # type: ignore[arg-type]
    )
    counts = [num_blocks] * len(model.windows)
    runner = DigestRunner(model, num_blocks=counts, block_size=block_size)
    return Engine(
        settings,
        runner,
        layout=runner.store.layout,
        num_blocks=counts,
        clock=clock or ManualClock(),
        strategy=strategy,
        host=HostTier(runner.store, [host_blocks] * len(counts), ManualClock()) if host_blocks else None,
    )


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    attempt: int = 0,
    resume: Sequence[int] = (),
    ignore_eos: bool = True,
    priority: int = 0,
    tenant: str = "",
    forks: int = 0,
    **sampling: object,
) -> Request:
    """Return a request; greedy unless a temperature is given."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos, **sampling
    )  # type: ignore[arg-type]
    return Request(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_token_ids=tuple(prompt),
        resume_token_ids=tuple(resume),
        priority=priority,
        tenant=tenant,
        forks=tuple(RequestId(f"{name}.{place}") for place in range(1, forks + 1)),
        sampling=params,
    )


def run(
    engine: Engine, requests: Sequence[Request], *, validate: bool = True, clock: ManualClock | None = None
) -> dict[str, list[int]]:
    """Submit all requests at once and return every output, resume tokens included. A step takes 0.3 s of the clock."""
    outputs = {
        sample.request_id: list(sample.resume_token_ids)
        for request in requests
        for sample in (request, *forks_of(request))
    }
    endings: dict[str, FinishReason] = {}
    for request in requests:
        engine.scheduler.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.index == len(outputs[delta.request_id]), "a token is missing or repeated"
            assert delta.request_id not in endings, "tokens after the ending"
            outputs[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                endings[delta.request_id] = delta.finish_reason
        if clock is not None:
            clock.advance(0.3)
        if validate:
            engine.scheduler.validate()
    assert set(endings) == set(outputs)
    return {str(name): tokens for name, tokens in outputs.items()}


def prompts_of(lengths: Sequence[int], vocab_size: int = 512, seed: int = 0) -> list[list[int]]:
    """Return random prompts of the given lengths; ids 0 to 9 are left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, vocab_size, (length,), generator=generator).tolist() for length in lengths]
