"""The engine: scheduler and model joined by one step. The same for every role; not thread-safe (one thread owns it)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import PrefixIdentity
from pdserve.cluster.base.request import TokenDelta
from pdserve.workers.engine.block_pool import BlockPool, Counts
from pdserve.workers.engine.scheduler import PlannedPrefill, Scheduler, SchedulerSettings
from pdserve.workers.model.runner import ModelRunner


@dataclass(slots=True)
class StepTimes:
    """Duration of the last step, and what to expect of the next."""

    last_s: float = 0.0
    mean_s: float = 0.0
    full_s: float = 0.0
    """A step that fills the token budget, measured at load."""

    @property
    def predicted_s(self) -> float:
        """The longest that the next step should take."""
        return max(self.last_s, self.mean_s, self.full_s)

    def observe(self, duration_s: float) -> None:
        """Take one measured step in; the mean forgets with factor 0.9."""
        self.last_s = duration_s
        self.mean_s = duration_s if self.mean_s == 0.0 else 0.9 * self.mean_s + 0.1 * duration_s


class KVExports(Protocol):
    """Ships the KV of prefill-only sequences while it is computed."""

    def begin_step(self, prefills: Sequence[PlannedPrefill]) -> bool:
        """Learn what the step computes; True if layers should be announced."""

    def layer_done(self, layer: int) -> None:
        """The step's KV of this layer is in the store."""


class Engine:
    """Runs requests on one model."""

    def __init__(
        self,
        settings: SchedulerSettings,
        runner: ModelRunner,
        *,
        layout: KVLayout,
        num_blocks: Counts,
        clock: Clock,
        promised_share: float = 0.25,
        numerics_digest: str = "",
    ) -> None:
        """`num_blocks` is one number per KV group of `layout`."""
        identity = PrefixIdentity(
            model_digest=layout.model_digest, kv_dtype=layout.kv_dtype, numerics_digest=numerics_digest
        )
        self.pool = BlockPool(num_blocks, promised_share=promised_share)
        self.scheduler = Scheduler(settings, self.pool, layout, identity, clock)
        self.runner = runner
        self.times = StepTimes()
        self.num_steps = 0
        self.exports: KVExports | None = None
        self._clock = clock

    def step(self) -> list[TokenDelta]:
        """Compute one plan; return the new tokens. Empty if there was nothing to compute."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        start_time = self._clock.now()
        exports = self.exports
        has_exports = exports is not None and exports.begin_step(self.scheduler.planned_prefills())
        output = self.runner.execute(plan, exports.layer_done if exports is not None and has_exports else None)
        deltas = self.scheduler.update(output)
        self.times.observe(self._clock.now() - start_time)
        self.num_steps += 1
        return deltas
