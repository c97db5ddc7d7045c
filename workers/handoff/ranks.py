"""The ranks of a worker as the hand-off sees them: those of this process, and through their channels all others."""

from collections.abc import Sequence
from typing import Protocol

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Role, WorkerInfo
from pdserve.kvtransfer.transports.factory import Transports
from pdserve.workers.handoff.exports import RankExporter
from pdserve.workers.handoff.settings import RankPort, RankSettings, Report
from pdserve.workers.handoff.sink_rank import SinkRank
from pdserve.workers.handoff.source_rank import SourceRank
from pdserve.workers.kv.copy import Copier


class Gang(Protocol):
    """The ranks of a worker that are in other processes."""

    async def cause_of(self, failure: str) -> str:
        """Return the first cause of a failure of rank 0's own: that of another rank, if it tells one now."""

    def start_handoff(self, role: Role, incarnation: Incarnation, report: Report) -> Sequence[RankPort]:
        """Let them take part; return them in order, from rank 1 on. `report` is called on the loop."""


class HostSettings(Protocol):
    """What a process that holds ranks knows; see WorkerSettings."""

    @property
    def host(self) -> str:
        """Address to listen on."""

    @property
    def channel(self) -> ChannelSettings:
        """The deployment's."""

    @property
    def transfer(self) -> TransferConfig:
        """The transfer section of the configuration."""

    @property
    def copiers(self) -> tuple[Copier, ...]:
        """One for each rank of this process."""

    @property
    def clock(self) -> Clock:
        """Measures durations."""

    @property
    def gang(self) -> Gang | None:
        """The ranks of other processes."""


class LocalRanks:
    """The ranks of this process, and the transports that they share."""

    def __init__(
        self, settings: HostSettings, role: Role, incarnation: Incarnation, report: Report, *, first_rank: int = 0
    ) -> None:
        self._host = settings.host
        self._role = role
        self._transports = Transports(settings.transfer, settings.channel.token, self._is_receiving)
        each = [
            RankSettings(
                rank=rank,
                incarnation=incarnation,
                config=settings.transfer,
                copier=copier,
                clock=settings.clock,
                transports=self._transports,
            )
            for rank, copier in enumerate(settings.copiers, start=first_rank)
        ]
        self.sources = [SourceRank(one, report) for one in each] if role is Role.PREFILL else []
        self.sinks = [SinkRank(one, report) for one in each] if role is Role.DECODE else []
        self.ports: list[SourceRank | SinkRank] = [*self.sources, *self.sinks]

    @property
    def transports(self) -> Transports:
        """What their links are made of."""
        return self._transports

    async def start(self) -> None:
        """Make ready what links need, and begin to land or to ship."""
        if self._role is not Role.MIXED:
            await self._transports.start(self._host, is_source=self._role is Role.PREFILL)
        for rank in self.ports:
            rank.start()

    async def stop(self) -> None:
        """Fence every link, and release what they share."""
        for rank in self.ports:
            await rank.stop()
        await self._transports.stop()

    def _is_receiving(self) -> bool:
        return any(sink.is_receiving for sink in self.sinks)


class HandoffRanks:
    """All ranks of a worker, at rank 0."""

    def __init__(self, settings: HostSettings, info: WorkerInfo, report: Report) -> None:
        self._local = LocalRanks(settings, info.role, info.incarnation, report)
        self._gang = settings.gang
        self._info = info
        self._report = report
        self.ports: list[RankPort] = [*self._local.ports]

    @property
    def exporters(self) -> list[RankExporter]:
        """Those of the ranks of this process."""
        return [rank.exporter for rank in self._local.sources]

    @property
    def local(self) -> LocalRanks:
        """Those of this process; for tests."""
        return self._local

    async def start(self) -> None:
        """Begin to land or to ship, on every rank."""
        await self._local.start()
        if self._gang is not None and self._info.role is not Role.MIXED:
            self.ports += self._gang.start_handoff(self._info.role, self._info.incarnation, self._report)

    async def stop(self) -> None:
        """End what this process holds; other ranks end with the worker."""
        await self._local.stop()
