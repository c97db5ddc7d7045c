"""The worker's end of its channel to the controller."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from pdserve.cluster.base.errors import ChannelClosedError
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import (
    Drain,
    Failed,
    Message,
    MetricsRequest,
    MetricsText,
    Peers,
    Register,
    Registered,
    Report,
    SendSnapshot,
    Trace,
    TraceRequest,
)
from pdserve.cluster.base.wire import Channel
from pdserve.cluster.base.worker_info import WorkerInfo, WorkerLoad
from pdserve.workers.cache_news import CacheNews

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.1
"""Until the controller says another."""


class Reporter(Protocol):
    """The worker."""

    @property
    def worker_id(self) -> WorkerId:
        """The worker's name."""

    def registration(self) -> tuple[WorkerInfo, WorkerLoad, str | None]:
        """Return who this worker is, its load, and the cause if its engine failed."""

    def announce_peers(self, workers: Sequence[WorkerInfo]) -> None:
        """These prefill workers are ready."""

    @property
    def is_unused(self) -> bool:
        """True if nobody waits for anything of this worker."""

    def drain(self) -> None:
        """Take no new requests."""

    def end(self, cause: str) -> None:
        """End the process."""

    def traces(self, prefix: str) -> tuple[str, ...]:
        """Return the timelines of a client request."""

    def metrics_text(self) -> str:
        """Return all metrics in Prometheus' format."""


class ControllerLink:
    """Registers, reports, and answers for metrics and traces."""

    def __init__(self, worker: Reporter, news: CacheNews, lease_s: float | None) -> None:
        """`lease_s`: how long the worker lives without a controller; None: for ever."""
        self._worker = worker
        self._lease_s = lease_s
        self._needed_time = asyncio.get_running_loop().time()
        self._interval_s = REPORT_INTERVAL_S
        self._news = news
        self._channel: Channel | None = None
        self._task: asyncio.Task[None] | None = None

    def channel_opened(self, channel: Channel) -> None:
        """See ChannelHandler."""
        self._channel = channel
        info, load, failure = self._worker.registration()
        channel.post(Register(info=info, load=load))
        self._news.begin_again()
        if failure is not None:
            channel.post(Failed(worker_id=info.worker_id, cause=failure))

    def message_received(self, channel: Channel, message: Message) -> None:
        """See ChannelHandler."""
        match message:
            case Registered(report_interval_s=interval_s):
                logger.info("the controller took this worker in")
                self._interval_s = interval_s
            case Drain():
                self._worker.drain()
            case SendSnapshot():
                self._news.begin_again()
            case Peers(workers=workers):
                self._worker.announce_peers(workers)
            case TraceRequest(query_id=query_id, prefix=prefix):
                timelines = self._worker.traces(prefix)
                channel.post(Trace(query_id=query_id, process=self._process, timelines=timelines))
            case MetricsRequest(query_id=query_id):
                text = self._worker.metrics_text()
                channel.post(MetricsText(query_id=query_id, process=self._process, text=text))
            case _:
                channel.close(f"unexpected {type(message).__name__} from the controller")

    @property
    def _process(self) -> str:
        return f"worker:{self._worker.worker_id}"

    def channel_closed(self, channel: Channel, reason: str) -> None:
        """See ChannelHandler."""
        self._channel = None

    def report_failure(self, cause: str) -> None:
        """Tell the controller now; if it is away, registration tells it later."""
        self._post(Failed(worker_id=self._worker.worker_id, cause=cause))

    def start_reporting(self) -> None:
        """Begin to send load reports."""
        self._task = asyncio.create_task(self._report(), name="load reports")

    async def stop_reporting(self) -> None:
        """End the reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _report(self) -> None:
        while True:
            info, load, _ = self._worker.registration()
            self._post(Report(worker_id=info.worker_id, load=load))
            if self._channel is not None:
                for update in self._news.take(info.worker_id, info.incarnation):
                    self._post(update)
            self._check_lease()
            await asyncio.sleep(self._interval_s)

    def _check_lease(self) -> None:
        """End a worker that no controller knows any more, and nobody waits for."""
        now = asyncio.get_running_loop().time()
        if self._channel is not None or not self._worker.is_unused:
            self._needed_time = now
        elif self._lease_s is not None and now - self._needed_time > self._lease_s:
            self._worker.end(f"no controller and no request for {self._lease_s:g} s (workers.lease_s)")

    def _post(self, message: Message) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(message)
        except ChannelClosedError as error:
            # The channel is about to be reported closed; registration tells everything again.
            logger.debug("a message to the controller could not be posted: %s", error)
