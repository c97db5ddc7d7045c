"""Rank 0's side of a gang: takes the other ranks in, forms the group, watches them, and speaks for the hand-off.

Runs on the worker's loop. What ends a rank ends the worker: the first cause is told, then the process ends, and with
its channels every other rank ends itself.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.errors import ChannelClosedError, ConfigError, PdserveError, RankLostError
from pdserve.cluster.base.ids import Incarnation
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.rank_messages import (
    FormGang,
    HandoffOrder,
    HandoffReport,
    JoinGang,
    RankFailed,
    RankHeartbeat,
    RankReady,
    RankState,
    StartHandoff,
)
from pdserve.cluster.base.wire import Channel, ChannelServer, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint, Role
from pdserve.kvtransfer.transports.data_port import DataPort, prepare_socket
from pdserve.kvtransfer.transports.endpoint import format_endpoint
from pdserve.kvtransfer.transports.torch_store import TorchStore
from pdserve.workers.engine.rank_step import RankStep
from pdserve.workers.gang.heartbeats import HEARTBEAT_S, Heartbeats
from pdserve.workers.gang.step_link import StepSender
from pdserve.workers.handoff.settings import RankPort, Report

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

KEY_BYTES = 16
CAUSE_S = 0.3
"""How long a failure of rank 0's own waits for the cause that another rank may tell."""


class RemoteRank:
    """A rank in another process. See RankPort."""

    def __init__(self, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        self.rank = rank
        self.joined: asyncio.Future[Channel] = loop.create_future()
        self.ready: asyncio.Future[RankReady] = loop.create_future()
        self._state = RankState(is_idle=True, num_lent_slots=0)

    def post(self, order: HandoffOrder) -> None:
        """See RankPort."""
        self.send(order)

    def send(self, message: Message) -> None:
        """Send a message; lost if the rank is gone, which ends the worker by itself."""
        try:
            self.joined.result().post(message)
        except ChannelClosedError as error:
            logger.debug("rank=%d a message could not be posted: %s", self.rank, error)

    def state_reported(self, state: RankState) -> None:
        """The rank says what it holds."""
        self._state = state

    @property
    def is_idle(self) -> bool:
        """See RankPort."""
        return self._state.is_idle

    @property
    def num_lent_slots(self) -> int:
        """See RankPort."""
        return self._state.num_lent_slots


class GangLeader:
    """The gang of one worker. See Gang, Followers and ChannelHandler."""

    def __init__(
        self, num_ranks: int, host: str, channel: ChannelSettings, clock: Clock, on_lost: Callable[[str], None]
    ) -> None:
        """`on_lost` is called once, on the loop, with the cause that ends the gang once it has formed."""
        self._host = host
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ranks = [RemoteRank(rank, self._loop) for rank in range(1, num_ranks)]
        self._server = ChannelServer(channel, self)
        self._port = DataPort(channel.token)
        self._store = TorchStore()
        self._key = secrets.token_hex(KEY_BYTES)
        self._failed: asyncio.Future[PdserveError] = self._loop.create_future()
        self._num_led = 0
        self._steps: StepSender | None = None
        self._beats: Heartbeats | None = None
        self._predicted_s: Callable[[], float] = lambda: 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._report: Report | None = None

    async def listen(self) -> Endpoint:
        """Begin to take ranks in; return where."""
        await self._port.start(self._host)
        return await self._server.start(self._host)

    async def form(self, timeout_s: float) -> tuple[object, str]:
        """Wait for every rank, and tell them to load; return the store and the key over which the ranks meet.

        Raises RankLostError, or ConfigError if a rank cannot be.
        """
        await self._until([rank.joined for rank in self._ranks], timeout_s, "joined")
        store = self._store.get(self._host)
        step_keys = {rank.rank: f"{self._key}-{rank.rank}" for rank in self._ranks}
        connections = {rank: self._port.expect(key) for rank, key in step_keys.items()}
        for rank in self._ranks:
            rank.send(
                FormGang(
                    num_ranks=len(self._ranks) + 1,
                    store=format_endpoint(self._host, self._store.port, self._key),
                    steps=format_endpoint(self._port.host, self._port.port, step_keys[rank.rank]),
                )
            )
        await self._until(list(connections.values()), timeout_s, "connected")
        sockets = {rank: connection.result() for rank, connection in connections.items()}
        for connection in sockets.values():
            prepare_socket(connection)
        self._steps = StepSender(sockets)
        await self._port.stop()
        return store, self._key

    async def wait_ready(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until every rank follows; return why their parts are not in the bitwise class. Raises as `form` does."""
        await self._until([rank.ready for rank in self._ranks], timeout_s, "was ready")
        return tuple(note for rank in self._ranks for note in rank.ready.result().notes)

    async def unless_failed(self, work: Awaitable[Result]) -> Result:
        """Return the outcome of `work`; raises what ends the gang before it is there."""
        task = asyncio.ensure_future(work)
        ends: set[asyncio.Future[Any]] = {task, self._failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done() and not task.done():
            task.cancel()
            raise self._failed.result()
        return await task

    @property
    def memory_bytes(self) -> int:
        """What the other ranks hold."""
        return sum(rank.ready.result().memory_bytes for rank in self._ranks)

    def watch(self, predicted_s: Callable[[], float]) -> None:
        """Begin to look for ranks that hang; `predicted_s` says how long a step takes now."""
        self._predicted_s = predicted_s
        self._beats = Heartbeats(len(self._ranks) + 1, self._clock.now(), self._num_led)
        # From the first one on the ranks watch too: they are not to wait for it while rank 0 serves already.
        self._send_beats()
        self._watcher = self._loop.create_task(self._watch(), name="gang beats")
        self._watcher.add_done_callback(self._watch_ended)
        if self._failed.done():
            # Between the last wait and this.
            self._on_lost(str(self._failed.result()))

    async def stop(self) -> None:
        """Let go of the ranks, which end themselves."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._steps is not None:
            self._steps.close()
        await self._server.stop()
        await self._port.stop()
        self._store.close()

    async def cause_of(self, failure: str) -> str:
        """Return the first cause of a failure of rank 0's own: that of another rank, if it tells one now."""
        await asyncio.wait([self._failed], timeout=CAUSE_S)
        return str(self._failed.result()) if self._failed.done() else failure

    # See Followers: on the engine thread.

    def broadcast(self, step: RankStep) -> None:
        """Send a step to each of them."""
        assert self._steps is not None, "the gang has formed"
        self._num_led += 1
        if self._beats is not None:
            self._beats.led(self._clock.now())
        self._steps.broadcast(step)

    # See Gang.

    def start_handoff(self, role: Role, incarnation: Incarnation, report: Report) -> Sequence[RankPort]:
        """Let the ranks take part; return them in order."""
        self._report = report
        for rank in self._ranks:
            rank.send(StartHandoff(role=role, incarnation=incarnation))
        return self._ranks

    # Channels of the ranks.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler; the first message tells which rank it is."""

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        rank = self._rank_of(channel)
        if rank is not None:
            self._fail(RankLostError(f"rank {rank.rank} is gone: {reason}"))

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        if isinstance(message, JoinGang):
            self._join(channel, message)
            return
        rank = self._rank_of(channel)
        if rank is None:
            channel.close(f"unexpected {type(message).__name__} from nobody")
            return
        match message:
            case RankReady():
                if not rank.ready.done():
                    rank.ready.set_result(message)
            case RankFailed():
                self._rank_failed(rank, message)
            case RankHeartbeat(num_steps=num_steps):
                if self._beats is not None:
                    self._beats.beat(rank.rank, num_steps, self._clock.now())
            case RankState():
                rank.state_reported(message)
            case _ if isinstance(message, HandoffReport) and self._report is not None:
                self._report(message)
            case _:
                channel.close(f"unexpected {type(message).__name__} from rank {rank.rank}")

    def _join(self, channel: Channel, message: JoinGang) -> None:
        if not 1 <= message.rank <= len(self._ranks) or self._ranks[message.rank - 1].joined.done():
            channel.close(f"rank {message.rank} is not awaited")
            return
        logger.info("rank=%d pid=%d joined", message.rank, message.pid)
        self._ranks[message.rank - 1].joined.set_result(channel)

    def _rank_of(self, channel: Channel) -> RemoteRank | None:
        joined = (rank for rank in self._ranks if rank.joined.done())
        return next((rank for rank in joined if rank.joined.result() is channel), None)

    # The end.

    def _rank_failed(self, rank: RemoteRank, message: RankFailed) -> None:
        kind = ConfigError if message.is_permanent else RankLostError
        failure = kind(f"rank {rank.rank}: {message.cause}")
        if message.is_consequence:
            # Whoever it was is about to be heard of.
            self._loop.call_later(CAUSE_S, self._fail, failure)
        else:
            self._fail(failure)

    def _fail(self, failure: PdserveError) -> None:
        """The first failure is the gang's end."""
        if self._failed.done():
            return
        self._failed.set_result(failure)
        logger.error("the gang ends: %s", failure)
        if self._beats is not None:
            self._on_lost(str(failure))

    async def _until(self, futures: Sequence[asyncio.Future[Any]], timeout_s: float, what: str) -> None:
        """Wait for all of them; raises what has failed meanwhile."""
        missing: set[asyncio.Future[Any]] = set(futures)
        deadline = self._loop.time() + timeout_s
        while missing and not self._failed.done():
            left_s = max(0.0, deadline - self._loop.time())
            done, _ = await asyncio.wait({*missing, self._failed}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RankLostError(f"not every rank {what} within {timeout_s:g} s")
            missing -= done
        if self._failed.done():
            raise self._failed.result()

    def _watch_ended(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and watcher.exception() is not None:
            self._fail(RankLostError(f"the watch of the ranks failed: {watcher.exception()}"))

    def _send_beats(self) -> None:
        for rank in self._ranks:
            rank.send(RankHeartbeat(num_steps=0))

    async def _watch(self) -> None:
        assert self._beats is not None, "it watches beats"
        while not self._failed.done():
            await asyncio.sleep(HEARTBEAT_S)
            self._send_beats()
            trouble = self._beats.trouble(self._clock.now(), self._predicted_s())
            if trouble is not None:
                self._fail(RankLostError(trouble))
