"""Tensor-parallel engines whose ranks are threads of the test."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.errors import RankLostError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role
from pdserve.workers.assembly import AssembledEngine, LoadedRank, load_rank, make_follower
from pdserve.workers.engine.rank_step import RankStep
from pdserve.workers.gang.step_codec import decode_step, encode_step
from pdserve.workers.handoff.ranks import LocalRanks
from pdserve.workers.handoff.settings import RankPort, Report
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.model.parallel import SOLO, RankGroup, thread_ranks
from support.engines import make_engine

OnStep = Callable[[int, RankStep], Callable[[int], None] | None]
"""Called by each following rank with its number and its step; what it returns is called at each layer."""
STEP_S = 60.0


class _Follower:
    def __init__(
        self, make_loaded: Callable[[], LoadedRank], config: EngineConfig, rank: int, on_step: OnStep | None
    ) -> None:
        self._config = config
        self.steps: queue.SimpleQueue[RankStep | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.loaded: LoadedRank | None = None
        self.is_loaded = threading.Event()
        self._make_loaded = make_loaded
        self._rank = rank
        self._on_step = on_step
        self.thread = threading.Thread(target=self._run, name=f"rank {rank}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loaded = self._make_loaded()
            self.is_loaded.set()
            runner = make_follower(self.loaded, self._config, num_threads=1)
            while (step := self.steps.get()) is not None:
                runner.follow(step, None if self._on_step is None else self._on_step(self._rank, step))
        except Exception as error:  # noqa: BLE001 — the barrier of a test's thread: reported when the gang ends
            self.error = error
            self.is_loaded.set()


class _Queues:
    """Hands steps to followers. See Followers."""

    def __init__(self, followers: Sequence[_Follower]) -> None:
        self._followers = followers

    def broadcast(self, step: RankStep) -> None:
        for follower in self._followers:
            if follower.error is not None:
                raise RankLostError(str(follower.error)) from follower.error
            # As over a link: no rank sees what another one holds.
            follower.steps.put(decode_step(encode_step(step)))


@dataclass(frozen=True, slots=True)
class Gang:
    """An engine of several ranks, and what the others have loaded."""

    assembled: AssembledEngine
    others: tuple[LoadedRank, ...]


@dataclass(frozen=True)
class _Host:
    """See HostSettings."""

    host: str
    channel: ChannelSettings
    transfer: TransferConfig
    copiers: tuple[BlockCopier, ...]
    clock: Clock
    gang: None = None


class ThreadGang:
    """The ranks of a running gang other than 0, in a worker of this process. See Gang."""

    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._starting: asyncio.Task[None] | None = None
        self._host: _Host | None = None

    def announcing(self, rank: int, step: RankStep) -> Callable[[int], None] | None:
        """See OnStep: on the rank's thread."""
        if not step.exported:
            return None
        assert self._ranks is not None, "a step ships KV when the hand-off has begun"
        exporter = self._ranks.sources[rank - 1].exporter
        exporter.begin_step(step.exported)
        return exporter.layer_done

    def attach(self, gang: Gang, channel: ChannelSettings, transfer: TransferConfig, clock: Clock) -> None:
        """Learn what the ranks hold."""
        copiers = tuple(BlockCopier(loaded.store) for loaded in gang.others)
        for copier in copiers:
            copier.warm_up()
        self._host = _Host("127.0.0.1", channel, transfer, copiers, clock)

    def start_handoff(self, role: Role, incarnation: Incarnation, report: Report) -> Sequence[RankPort]:
        """See Gang."""
        assert self._host is not None, "attached before"
        self._ranks = LocalRanks(self._host, role, incarnation, report, first_rank=1)
        self._starting = asyncio.get_running_loop().create_task(self._ranks.start())
        return self._ranks.ports

    async def cause_of(self, failure: str) -> str:
        """See Gang."""
        return failure

    async def stop(self) -> None:
        """End the ranks' part of the hand-off."""
        if self._ranks is not None:
            await self._ranks.stop()


@contextmanager
def running_gang(folder: Path, num_ranks: int, *, on_step: OnStep | None = None, **settings: object) -> Iterator[Gang]:
    """An engine of `num_ranks`, in as many threads. `settings` are those of make_engine."""
    groups: Sequence[RankGroup] = thread_ranks(num_ranks, STEP_S) if num_ranks > 1 else [SOLO]
    names = set(EngineConfig.model_fields)
    shared = {"kv_memory_gib": 0.02, "linear": "fp32", **{key: settings[key] for key in settings if key in names}}
    config = EngineConfig(tensor_parallel=num_ranks, **shared)  # type: ignore[arg-type]
    followers: list[_Follower] = []
    for group in groups[1:]:

        def load(group: object = group) -> LoadedRank:
            return load_rank(folder, config, max_model_len=None, num_threads=1, group=group)  # type: ignore[arg-type]

        followers.append(_Follower(load, config, group.rank, on_step))
        # One after the other: packing probes kernels at a thread count of the process.
        assert followers[-1].is_loaded.wait(STEP_S)
    try:
        queues = _Queues(followers) if followers else None
        assembled = make_engine(folder, group=groups[0], followers=queues, **settings)  # type: ignore[arg-type]
        others = tuple(follower.loaded for follower in followers if follower.loaded is not None)
        yield Gang(assembled, others)
    finally:
        for follower in followers:
            follower.steps.put(None)
        for follower in followers:
            follower.thread.join(STEP_S)
    errors = [follower.error for follower in followers if follower.error is not None]
    assert not errors, errors
