"""Rank 0's side of a gang over real channels: what is lost while nobody waits for it is not lost."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.errors import ConfigError, RankLostError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.rank_messages import FormGang, JoinGang, RankFailed, RankHeartbeat, RankReady
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint
from pdserve.kvtransfer.transports.data_port import connect_data
from pdserve.workers.gang.leader import GangLeader

CHANNEL = ChannelSettings(token=b"secret")
HOST = "127.0.0.1"
WAIT_S = 5.0


class Rank:
    """Joins, connects, and is ready. See ChannelHandler."""

    def __init__(self, endpoint: Endpoint) -> None:
        async def resolve() -> Endpoint:
            return endpoint

        self.client = ChannelClient(CHANNEL, self, resolve, name="rank 0")
        self.channel: Channel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._steps: socket.socket | None = None
        self.has_beat = asyncio.Event()

    def channel_opened(self, channel: Channel) -> None:
        self.channel = channel
        channel.post(JoinGang(rank=1, pid=1))

    def channel_closed(self, channel: Channel, reason: str) -> None:
        self.channel = None

    def message_received(self, channel: Channel, message: Message) -> None:
        if isinstance(message, FormGang):
            self._connecting = asyncio.create_task(self._connect(message, channel))
        elif isinstance(message, RankHeartbeat):
            self.has_beat.set()

    async def _connect(self, message: FormGang, channel: Channel) -> None:
        self._steps = await connect_data(message.steps, CHANNEL.token)
        channel.post(RankReady(notes=(), memory_bytes=1))

    def tell(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.post(message)

    async def leave(self) -> None:
        if self._connecting is not None:
            await self._connecting
        if self._steps is not None:
            self._steps.close()
        await self.client.stop()


@asynccontextmanager
async def formed_gang(causes: list[str]) -> AsyncIterator[tuple[GangLeader, Rank]]:
    leader = GangLeader(2, HOST, CHANNEL, SystemClock(), causes.append)
    rank = Rank(await leader.listen())
    rank.client.start()
    try:
        await leader.form(WAIT_S)
        yield leader, rank
    finally:
        await rank.leave()
        await leader.stop()


async def until_failed(leader: GangLeader) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises((RankLostError, ConfigError)):
            await leader.unless_failed(asyncio.sleep(60))


async def test_a_rank_that_is_lost_before_the_watch_begins_is_reported_when_it_does() -> None:
    causes: list[str] = []
    async with formed_gang(causes) as (leader, rank):
        await leader.wait_ready(WAIT_S)
        await rank.leave()
        await until_failed(leader)
        assert causes == [], "rank 0 is still loading"
        leader.watch(lambda: 0.0)
        assert len(causes) == 1
        assert causes[0].startswith("rank 1 is gone")


async def test_what_rank_0_does_meanwhile_ends_with_the_failure_of_another_rank() -> None:
    async with formed_gang([]) as (leader, rank):
        loading = asyncio.create_task(leader.unless_failed(asyncio.sleep(60)))
        rank.tell(RankFailed(cause="a weight is missing", is_permanent=True, is_consequence=False))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ConfigError, match="rank 1: a weight is missing"):
                await loading


async def test_ranks_are_told_at_once_that_rank_0_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank 0 that freezes in its first moment of service is found like any other.
    monkeypatch.setattr("pdserve.workers.gang.leader.HEARTBEAT_S", 60.0)
    async with formed_gang([]) as (leader, rank):
        await leader.wait_ready(WAIT_S)
        leader.watch(lambda: 0.0)
        async with asyncio.timeout(WAIT_S):
            await rank.has_beat.wait()


async def test_what_is_done_already_comes_back_whatever_has_failed() -> None:
    async with formed_gang([]) as (leader, rank):
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result("loaded before")
        assert await leader.unless_failed(asyncio.sleep(0, "loaded")) == "loaded"
        with pytest.raises(ValueError, match="no such file"):
            await leader.unless_failed(fail())
        await rank.leave()
        await until_failed(leader)
        assert await leader.unless_failed(done) == "loaded before"


async def fail() -> None:
    raise ValueError("no such file")
