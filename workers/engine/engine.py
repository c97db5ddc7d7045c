"""The engine: scheduler and model joined by one step. The same for every role; not thread-safe (one thread owns it)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import PrefixIdentity
from pdserve.cluster.base.request import TokenDelta
from pdserve.workers.engine.block_pool import BlockPool, Counts
from pdserve.workers.engine.pending_copies import PendingCopies
from pdserve.workers.engine.plan import StepPlan
from pdserve.workers.engine.rank_step import BlockCopy, CopyKind, Exported
from pdserve.workers.engine.scheduler import PlannedPrefill, Scheduler, SchedulerSettings
from pdserve.workers.engine.step_model import StepModel, StepShape
from pdserve.workers.engine.strategies import Strategy
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.model.runner import ModelRunner

COPY_FORGIVENESS = 0.98


class KVExports(Protocol):
    """Ships the KV of prefill-only sequences while it is computed."""

    def begin_step(self, prefills: Sequence[PlannedPrefill]) -> Exported:
        """Learn what the step computes; return what of it is shipped, whose layers are announced then."""

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
        strategy: Strategy | None = None,
        itl_target_s: float | None = None,
        host: HostTier | None = None,
    ) -> None:
        """`num_blocks` is one number per KV group of `layout`.

        With `itl_target_s`, steps that hold up decodes are as large as that allows, by the fitted step time.
        """
        self.identity = PrefixIdentity(
            model_digest=layout.model_digest, kv_dtype=layout.kv_dtype, numerics_digest=numerics_digest
        )
        self.pool = BlockPool(num_blocks, promised_share=promised_share)
        self.host = host
        self._copies = PendingCopies(self.pool) if layout.tp_size > 1 else None
        if host is not None and self._copies is not None:
            host.on_copy = self._copies.note
        self.times = StepModel()
        self._block_size = layout.block_size
        self.scheduler = Scheduler(
            settings,
            self.pool,
            layout,
            self.identity,
            clock,
            strategy,
            copy_block=self._copy_block,
            host=host,
            is_load_worth=self._is_load_worth,
        )
        self.runner = runner
        self._itl_target_s = itl_target_s
        self.num_steps = 0
        self.exports: KVExports | None = None
        self._clock = clock

    @property
    def has_work(self) -> bool:
        """True if there are sequences, or copies to settle."""
        return self.scheduler.has_work or self.has_unsettled_copies

    @property
    def has_unsettled_copies(self) -> bool:
        """True if there are copies of blocks that the other ranks are still to make; it ends with the next `step`."""
        return bool(self._copies)

    def step(self) -> list[TokenDelta]:
        """Compute one plan; return the new tokens. Empty if there was nothing to compute."""
        plan = self.scheduler.schedule(self._budget())
        copies = self._copies.take() if self._copies else ()
        if plan is None:
            if copies:
                self.runner.settle(copies)
                self._copies_made()
            return []
        start_time = self._clock.now()
        exports = self.exports
        exported = () if exports is None else exports.begin_step(self.scheduler.planned_prefills())
        on_layer = exports.layer_done if exports is not None and exported else None
        output = self.runner.execute(plan, on_layer, exported, copies)
        self._copies_made()
        deltas = self.scheduler.update(output)
        self.times.observe(shape_of(plan), self._clock.now() - start_time)
        self.num_steps += 1
        return deltas

    def _copy_block(self, group: int, source: int, target: int) -> None:
        self.runner.copy_block(group, source, target)
        if self._copies is not None:
            self._copies.note(BlockCopy(kind=CopyKind.FORK, group=group, source=source, target=target))

    def _copies_made(self) -> None:
        if self._copies is not None:
            self._copies.made()

    def _is_load_worth(self) -> bool:
        """True if a block comes back from the host tier quicker than it is computed; also while nothing is measured."""
        if self.host is None:
            return False
        per_token = self.times.fit.per_token
        # One copy a group stands against computing a block of tokens.
        if per_token == 0.0 or self.host.block_s * self.pool.num_groups < per_token * self._block_size:
            return True
        # A copy that was slow once must not be the last one.
        self.host.block_s *= COPY_FORGIVENESS
        return False

    def _budget(self) -> int | None:
        """Return the token budget of the next step; None if nothing limits it but the settings."""
        if self._itl_target_s is None:
            return None
        decoding = self.scheduler.decoding_shape()
        if not decoding.num_rows:
            return None
        return self.times.budget(self._itl_target_s, decoding, self.scheduler.max_batch_tokens)


def shape_of(plan: StepPlan) -> StepShape:
    """Return what a plan's duration depends on."""
    ends = plan.positions[plan.row_starts[1:] - 1]
    counts = np.diff(plan.row_starts).astype(np.int64)
    several = counts > 1
    pairs = counts * (ends + 1) - counts * (counts - 1) // 2
    return StepShape(
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        num_context_tokens=int(ends[~several].sum()),
        num_pairs=int(pairs[several].sum()),
    )
