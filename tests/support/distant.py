"""Ranks of a worker as if they were in other processes: every order, report and step takes its time, in order."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.rank_messages import HandoffOrder
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.engine.plan import StepOutput, StepPlan
from pdserve.workers.engine.rank_step import Copies, Exported
from pdserve.workers.handoff.ranks import LocalRanks
from pdserve.workers.handoff.settings import RankPort, Report
from pdserve.workers.handoff.sink_rank import SinkRank
from pdserve.workers.handoff.source_rank import SourceRank
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.model.digest import DigestRunner
from pdserve.workers.model.runner import OnLayer


class Pipe:
    """Delivers calls in order, each after a random while."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self._rng = rng
        self._longest_s = longest_s
        self._loop = asyncio.get_running_loop()
        self._last_time = 0.0
        self._calls: list[Callable[[], None]] = []

    def put(self, call: Callable[[], None]) -> None:
        """Deliver a call."""
        self._calls.append(call)
        self._last_time = max(self._last_time, self._loop.time() + self._rng.uniform(0.0, self._longest_s))
        self._loop.call_at(self._last_time, self._deliver)

    def _deliver(self) -> None:
        self._calls.pop(0)()


@dataclass(frozen=True)
class _Host:
    """See HostSettings."""

    host: str
    channel: ChannelSettings
    transfer: TransferConfig
    copiers: tuple[BlockCopier, ...]
    clock: Clock
    gang: None = None


class _DistantRank:
    """See RankPort."""

    def __init__(self, rank: SourceRank | SinkRank, pipe: Pipe, is_started: asyncio.Future[None]) -> None:
        self.rank = rank
        self._pipe = pipe
        self._is_started = is_started
        self._early: list[HandoffOrder] = []

    def post(self, order: HandoffOrder) -> None:
        self._pipe.put(partial(self._take, order))

    def _take(self, order: HandoffOrder) -> None:
        if self._is_started.done():
            self.rank.post(order)
            return
        if not self._early:
            self._is_started.add_done_callback(self._flush)
        self._early.append(order)

    def _flush(self, _: object) -> None:
        for order in self._early:
            self.rank.post(order)

    @property
    def is_idle(self) -> bool:
        # What a real port knows is what the rank has said; a test waits for the truth.
        return self.rank.is_idle

    @property
    def num_lent_slots(self) -> int:
        return self.rank.num_lent_slots


class DistantGang:
    """Ranks 1, 2, … of a worker on the digest model. See Gang."""

    def __init__(
        self,
        copiers: Sequence[BlockCopier],
        transfer: TransferConfig,
        channel: ChannelSettings,
        clock: Clock,
        rng: random.Random,
        longest_s: float,
    ) -> None:
        self._host = _Host("127.0.0.1", channel, transfer, tuple(copiers), clock)
        self._num_layers = copiers[0].layout.num_layers
        self._rng = rng
        self._longest_s = longest_s
        self._steps: list[tuple[SourceRank, Pipe]] = []
        self._loop = asyncio.get_running_loop()
        self._ranks: LocalRanks | None = None
        self._starting: asyncio.Task[None] | None = None

    def start_handoff(self, role: Role, incarnation: Incarnation, report: Report) -> Sequence[RankPort]:
        """See Gang."""
        reports = Pipe(self._rng, self._longest_s)
        self._ranks = LocalRanks(
            self._host, role, incarnation, lambda said: reports.put(partial(report, said)), first_rank=1
        )
        started: asyncio.Future[None] = self._loop.create_future()
        self._starting = self._loop.create_task(self._start(self._ranks, started))
        self._steps = [(source, Pipe(self._rng, self._longest_s)) for source in self._ranks.sources]
        return [
            _DistantRank(rank, Pipe(self._rng, self._longest_s), started)
            for rank in (*self._ranks.sources, *self._ranks.sinks)
        ]

    async def cause_of(self, failure: str) -> str:
        """See Gang."""
        return failure

    async def _start(self, ranks: LocalRanks, started: asyncio.Future[None]) -> None:
        await ranks.start()
        started.set_result(None)

    async def stop(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            await self._ranks.stop()

    def follow(self, exported: Exported) -> None:
        """A step was computed; from the engine's thread. The KV of a slow rank is pinned until it has shipped it."""
        self._loop.call_soon_threadsafe(self._follow, exported)

    def _follow(self, exported: Exported) -> None:
        for source, pipe in self._steps:
            pipe.put(partial(self._step, source, exported))

    def _step(self, source: SourceRank, exported: Exported) -> None:
        if source.exporter.begin_step(exported):
            for layer in range(self._num_layers):
                source.exporter.layer_done(layer)


class FollowedRunner:
    """A digest runner whose steps a gang follows. See ModelRunner."""

    def __init__(self, runner: DigestRunner, gang: DistantGang) -> None:
        self._runner = runner
        self._gang = gang

    def bind_thread(self) -> None:
        """See ModelRunner."""
        self._runner.bind_thread()

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        self._runner.copy_block(group, source, target)

    def settle(self, copies: Copies) -> None:
        """See ModelRunner."""
        self._runner.settle(copies)

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner."""
        output = self._runner.execute(plan, on_layer, exported, copies)
        if exported:
            self._gang.follow(exported)
        return output
