"""An engine that takes the time of a law and computes nothing: for what matters of many workers on few cores."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from pdserve.benchmarks.handoff_workers import NullRunner
from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.kv_layout import GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.worker_info import StepFit
from pdserve.workers.engine.engine import Engine, shape_of
from pdserve.workers.engine.plan import StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.runner import OnLayer

LAYOUT = KVLayout(
    model_digest="paced",
    kv_dtype=KVDtype.FLOAT32,
    block_size=16,
    num_kv_heads=1,
    head_dim=16,
    groups=(GroupLayout(window=0, layers=(0, 1)),),
)
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a step takes, and how much fits."""

    law: StepFit
    max_batch_tokens: int
    num_blocks: int


class PacedRunner(NullRunner):
    """Sleeps as long as a step takes; its layers are there at its end."""

    def __init__(self, law: StepFit) -> None:
        super().__init__(LAYOUT.num_layers)
        self._law = law

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner."""
        law, shape = self._law, shape_of(plan)
        time.sleep(
            law.base
            + law.per_token * shape.num_tokens
            + law.per_row * shape.num_rows
            + law.per_context_kilotoken * shape.num_context_tokens / 1000
            + law.per_kilopair * shape.num_pairs / 1000
        )
        return super().execute(plan, on_layer, exported, copies)


def make_paced_engine(pace: Pace) -> tuple[Engine, KVStore]:
    """Return an engine that keeps a pace."""
    store = KVStore(LAYOUT, num_blocks=(pace.num_blocks,), device=torch.device("cpu"))
    settings = SchedulerSettings(
        block_size=LAYOUT.block_size,
        max_running=MAX_RUNNING,
        max_batch_tokens=pace.max_batch_tokens,
        max_waiting=4096,
        max_model_len=pace.num_blocks * LAYOUT.block_size // 2,
    )
    engine = Engine(settings, PacedRunner(pace.law), layout=LAYOUT, num_blocks=(pace.num_blocks,), clock=SystemClock())
    return engine, store


def tokens_of(hash_id: int, num_tokens: int) -> list[int]:
    """Return the tokens that a trace's block stands for."""
    tokens: list[int] = np.random.default_rng(hash_id).integers(1000, 20000, num_tokens).tolist()
    return tokens
