"""Digest runners that a test can hold in mid-flight, and copiers that damage what arrives."""

import random
import threading
import time

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.kv_layout import ChunkRange, KVDtype
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.plan import NO_TOKEN, Int32, StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.digest import DigestModel, DigestRunner
from pdserve.workers.model.runner import OnLayer
from support.engines import make_digest_engine

GATE_S = 20


class GatedRunner(DigestRunner):
    """Goes past a step, or past a layer, only while the gate is open; raises if told to."""

    def __init__(self, model: DigestModel, *, num_blocks: tuple[int, ...] = (64, 64), block_size: int = 16) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=block_size)
        self.gate = threading.Event()
        self.gate.set()
        self.layer_gate = threading.Event()
        self.layer_gate.set()
        self.fails = False
        self.fails_after_layers = False
        self.num_layers_done = 0

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner.execute."""
        assert self.gate.wait(GATE_S), "the test never opened the gate"
        if self.fails:
            raise RuntimeError("the model exploded")

        def gated(layer: int) -> None:
            assert on_layer is not None, "called only if layers are announced"
            on_layer(layer)
            self.num_layers_done += 1
            assert self.layer_gate.wait(GATE_S), "the test never opened the gate"

        tokens = super().execute(plan, None if on_layer is None else gated, exported, copies)
        if self.fails_after_layers:
            raise RuntimeError("the model exploded")
        return tokens


class PacedRunner(DigestRunner):
    """Takes the time of a law."""

    base_s = 0.002
    token_s = 0.0005

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner.execute."""
        time.sleep(self.base_s + self.token_s * plan.num_tokens)
        return super().execute(plan, on_layer, exported, copies)


def make_paced_engine(model: DigestModel, **limits: int) -> Engine:
    """Return a digest engine on a paced runner, on the machine's clock."""
    engine = make_digest_engine(model, clock=SystemClock(), **limits)
    engine.runner = PacedRunner(model, num_blocks=engine.pool.num_blocks, block_size=16)
    return engine


class BlindRunner(DigestRunner):
    """Finds no finite logits for rows whose prompt begins with 500."""

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner.execute."""
        output = super().execute(plan, on_layer, exported, copies)
        first_tokens = plan.token_ids[plan.row_starts[plan.sample_rows]]
        output.token_ids[first_tokens == 500] = NO_TOKEN
        return output


def make_gated_engine(model: DigestModel, **limits: int) -> tuple[Engine, GatedRunner]:
    """Return a digest engine on a gated runner."""
    engine = make_digest_engine(model, **limits)  # type: ignore[arg-type]
    runner = GatedRunner(model, num_blocks=engine.pool.num_blocks, block_size=limits.get("block_size", 16))
    engine.runner = runner
    return engine, runner


class GatedCopier(BlockCopier):
    """Scatters only while the gate is open."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """See BlockCopier.scatter."""
        assert self.gate.wait(GATE_S), "the test never opened the gate"
        return super().scatter(chunk, blocks, body, wire_dtype)


class SlowCopier(BlockCopier):
    """Waits before it gathers, as a busy transport thread would."""

    def gather(
        self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype, after: object = None
    ) -> int:
        """See BlockCopier.gather."""
        threading.Event().wait(0.02)
        return super().gather(chunk, blocks, body, wire_dtype, after)


class DamagingCopier(BlockCopier):
    """Flips a bit of some of the bodies it scatters, as a bad wire would."""

    def __init__(self, store: KVStore, *, share: float, seed: int = 0) -> None:
        super().__init__(store)
        self.share = share
        self.num_damaged = 0
        self._random = random.Random(seed)

    def scatter(self, chunk: ChunkRange, blocks: Int32, body: memoryview, wire_dtype: KVDtype) -> int:
        """See BlockCopier.scatter."""
        if self._random.random() >= self.share:
            return super().scatter(chunk, blocks, body, wire_dtype)
        self.num_damaged += 1
        damaged = bytearray(body)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return super().scatter(chunk, blocks, memoryview(damaged), wire_dtype)
