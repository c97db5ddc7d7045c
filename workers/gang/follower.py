"""A rank other than 0: joins its gang, loads its part of the model, follows rank 0's steps, and moves its own KV.

One thread runs the steps; the loop has the channel to rank 0 and this rank's part of the hand-off. Whatever fails, and
the loss of rank 0, ends the process: `run` returns why.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import psutil

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransferConfig
from pdserve.cluster.base.engine_config import EngineConfig
from pdserve.cluster.base.errors import (
    ChannelClosedError,
    ClientError,
    ConfigError,
    PdserveError,
    ProtocolError,
    RankLostError,
    first_line,
)
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.rank_messages import (
    FormGang,
    HandoffOrder,
    JoinGang,
    RankFailed,
    RankHeartbeat,
    RankReady,
    StartHandoff,
)
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint
from pdserve.kvtransfer.transports.data_port import connect_data
from pdserve.kvtransfer.transports.endpoint import parse_endpoint
from pdserve.kvtransfer.transports.torch_store import open_store, own_address
from pdserve.workers.assembly import LoadedRank, make_follower
from pdserve.workers.engine.rank_step import RankStep
from pdserve.workers.gang.heartbeats import HEARTBEAT_S, SILENCE_S, AwakeTime
from pdserve.workers.gang.step_link import StepReceiver
from pdserve.workers.handoff.exports import RankExporter
from pdserve.workers.handoff.ranks import LocalRanks
from pdserve.workers.kv.copy import Copier, make_copier

logger = logging.getLogger(__name__)

HANDOFF_ORDERS = get_args(HandoffOrder)
EXPORTER_S = 10.0


@dataclass(frozen=True, slots=True)
class _Host:
    """See HostSettings."""

    host: str
    channel: ChannelSettings
    transfer: TransferConfig
    copiers: tuple[Copier, ...]
    clock: Clock
    gang: None = None


LoadRank = Callable[[object, str, str, int], LoadedRank]
"""Called on a thread with the store, the key, this rank's address and the number of ranks: meets them, and loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettings:
    """What a rank needs to know besides its model."""

    rank: int
    host: str
    channel: ChannelSettings
    transfer: TransferConfig
    clock: Clock
    engine: EngineConfig
    num_threads: int
    join_timeout_s: float
    """How long to look for rank 0."""


class Follower:
    """One rank. See ChannelHandler."""

    def __init__(
        self, settings: FollowerSettings, load: LoadRank, resolve_leader: Callable[[], Awaitable[Endpoint]]
    ) -> None:
        self._settings = settings
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[PdserveError] = self._loop.create_future()
        self._channel: Channel | None = None
        self._client = ChannelClient(settings.channel, self, resolve_leader, name="rank 0")
        self._forming: asyncio.Task[None] | None = None
        self._handoff: LocalRanks | None = None
        self._is_handing_off = False
        self._orders: list[HandoffOrder] = []
        self._exporter: RankExporter | None = None
        self._copier: Copier | None = None
        self._steps: StepReceiver | None = None
        self._thread: threading.Thread | None = None
        self._starting: asyncio.Task[None] | None = None
        self._has_exporter = threading.Event()
        self._is_watched = False
        self._awake = AwakeTime(settings.clock.now())
        self._heard_time = 0.0
        self._num_steps = 0

    async def run(self) -> PdserveError:
        """Take part until something ends it; return why."""
        self._client.start()
        beats = self._loop.create_task(self._beat(), name="beats")
        try:
            return await self._ended
        finally:
            if self._steps is not None:
                self._steps.close()
            tasks = [task for task in (beats, self._forming, self._starting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.stop()
            if self._handoff is not None:
                await self._handoff.stop()

    def _end(self, why: str, *, is_permanent: bool = False) -> None:
        if not self._ended.done():
            self._ended.set_result(ConfigError(why) if is_permanent else RankLostError(why))

    # The channel to rank 0.

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
        channel.post(JoinGang(rank=self._settings.rank, pid=os.getpid()))

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler: without rank 0 there is no worker."""
        self._channel = None
        self._end(f"rank 0 is gone: {reason}")

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        self._heard_time = self._awake.at(self._settings.clock.now())
        match message:
            case FormGang() if self._forming is None:
                self._forming = self._loop.create_task(self._form(message), name="forming")
            case StartHandoff() if self._handoff is None and self._copier is not None:
                self._start_handoff(message, self._copier)
            case RankHeartbeat():
                self._is_watched = True
            case _ if isinstance(message, HANDOFF_ORDERS) and self._handoff is not None:
                self._obey(message)
            case _:
                channel.close(f"unexpected {type(message).__name__} from rank 0")

    def _post(self, message: Message) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            logger.debug("a message to rank 0 could not be posted: %s", error)

    # Forming.

    async def _form(self, message: FormGang) -> None:
        try:
            await self._join_group(message)
        except Exception as error:
            # The barrier of this task: rank 0 is told, and the process ends.
            logger.exception("this rank cannot start")
            self._fail(
                first_line(error),
                is_permanent=isinstance(error, ClientError),
                is_consequence=isinstance(error, RankLostError),
            )

    async def _join_group(self, message: FormGang) -> None:
        settings = self._settings
        connection = await connect_data(message.steps, settings.channel.token)
        self._steps = StepReceiver(connection)
        host, port, key = parse_endpoint("store", message.store)

        def load() -> LoadedRank:
            return self._load(open_store(host, port), key, own_address(host, port), message.num_ranks)

        loaded = await asyncio.to_thread(load)
        copier = make_copier(loaded.store)
        await asyncio.to_thread(copier.warm_up)
        self._copier = copier
        self._thread = threading.Thread(target=self._run_steps, args=(loaded, self._steps), name="engine", daemon=True)
        self._thread.start()
        self._post(RankReady(notes=loaded.model.notes, memory_bytes=psutil.Process(os.getpid()).memory_info().rss))

    # Steps: on their own thread.

    def _run_steps(self, loaded: LoadedRank, steps: StepReceiver) -> None:
        cause, is_consequence = "rank 0 closed", True
        try:
            runner = make_follower(loaded, self._settings.engine, num_threads=self._settings.num_threads)
            while (step := steps.receive()) is not None:
                runner.follow(step, self._announcing(step))
                self._num_steps += 1
        except Exception as error:
            # The barrier of this thread: the rank's failure is the worker's.
            logger.exception("the rank failed")
            cause, is_consequence = f"{type(error).__name__}: {error}", isinstance(error, RankLostError)
        self._loop.call_soon_threadsafe(partial(self._fail, cause, is_consequence=is_consequence))

    def _announcing(self, step: RankStep) -> Callable[[int], None] | None:
        """Return what is to be called at each layer of the step."""
        if not step.exported:
            return None
        # A step and the order to take part come on two paths.
        self._has_exporter.wait(EXPORTER_S)
        if self._exporter is None:
            raise ProtocolError("a step ships KV, and this rank takes no part in the hand-off")
        self._exporter.begin_step(step.exported)
        return self._exporter.layer_done

    def _fail(self, cause: str, *, is_permanent: bool = False, is_consequence: bool = False) -> None:
        self._post(RankFailed(cause=cause, is_permanent=is_permanent, is_consequence=is_consequence))
        # A moment for the message; rank 0 ends the gang, and its channel with it.
        self._loop.call_later(HEARTBEAT_S, partial(self._end, cause, is_permanent=is_permanent))

    # The hand-off.

    def _start_handoff(self, message: StartHandoff, copier: Copier) -> None:
        settings = self._settings
        host = _Host(settings.host, settings.channel, settings.transfer, (copier,), settings.clock)
        ranks = LocalRanks(host, message.role, message.incarnation, self._post, first_rank=settings.rank)
        self._handoff = ranks
        if ranks.sources:
            self._exporter = ranks.sources[0].exporter
            self._has_exporter.set()
        self._starting = self._loop.create_task(self._begin(ranks), name="hand-off")

    async def _begin(self, ranks: LocalRanks) -> None:
        try:
            await ranks.start()
        except Exception as error:
            # The barrier of this task: rank 0 is told, and the process ends.
            logger.exception("this rank cannot take part in the hand-off")
            self._fail(first_line(error))
            return
        orders, self._orders = self._orders, []
        for order in orders:
            ranks.ports[0].post(order)
        self._is_handing_off = True

    def _obey(self, order: HandoffOrder) -> None:
        assert self._handoff is not None, "asked before"
        if self._is_handing_off:
            self._handoff.ports[0].post(order)
        else:
            self._orders.append(order)

    # Heartbeats.

    async def _beat(self) -> None:
        start_time = self._settings.clock.now()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = self._settings.clock.now()
            awake = self._awake.looked(now)
            self._post(RankHeartbeat(num_steps=self._num_steps))
            if self._channel is None and now - start_time > self._settings.join_timeout_s:
                self._end(f"rank 0 was not found in {self._settings.join_timeout_s:g} s")
            if self._is_watched and awake - self._heard_time > SILENCE_S:
                self._end(f"rank 0 is silent for {awake - self._heard_time:.1f} s")
