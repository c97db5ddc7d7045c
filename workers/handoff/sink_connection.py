"""A decode worker as a prefill worker sees it: the channel it said HELLO on, and which streams are ready."""

import logging

from pdserve.cluster.base.errors import ChannelClosedError, ConfigError, ProtocolError
from pdserve.cluster.base.messages import Message
from pdserve.cluster.base.rank_messages import LinkMessage
from pdserve.cluster.base.transfer_messages import Hello
from pdserve.cluster.base.wire import Channel
from pdserve.kvtransfer.layout import plan_streams
from pdserve.workers.handoff.export_book import plan_pair
from pdserve.workers.handoff.settings import HandoffSettings

logger = logging.getLogger(__name__)


class SinkConnection:
    """One decode worker on one channel."""

    def __init__(self, pair_no: int, channel: Channel, hello: Hello, settings: HandoffSettings) -> None:
        """Raises ConfigError if a slot is too small for the pair."""
        self.pair_no = pair_no
        self.channel = channel
        self.worker_id = hello.worker_id
        self.incarnation = hello.incarnation
        self._usable: set[int] = set()
        streams = plan_streams(settings.layout, hello.kv)
        try:
            self.plan = plan_pair(settings.layout, streams, settings.config.slot_bytes)
        except ValueError as error:
            raise ConfigError(f"transfer.slot_bytes: {error}") from error

    @property
    def num_streams(self) -> int:
        """Streams of the pair."""
        return len(self.plan.streams)

    @property
    def is_ready(self) -> bool:
        """True if every stream has a link that new transfers may use."""
        return len(self._usable) == self.num_streams

    def stream_usable(self, stream_no: int, is_usable: bool) -> None:
        """A stream has, or has no longer, such a link."""
        if is_usable:
            self._usable.add(stream_no)
        else:
            self._usable.discard(stream_no)

    def rank_of(self, message: LinkMessage) -> int:
        """Return the rank that a message about a link is for. Raises ProtocolError for a stream that there is not."""
        if not 0 <= message.stream_no < self.num_streams:
            raise ProtocolError(f"stream {message.stream_no} of {self.num_streams}")
        return self.plan.streams[message.stream_no].source_rank

    def post(self, message: Message) -> None:
        """Send a message; lost if the channel has gone: that is reported, and ends what it carried."""
        try:
            self.channel.post(message)
        except ChannelClosedError as error:
            logger.debug("worker_id=%s a message could not be posted: %s", self.worker_id, error)
