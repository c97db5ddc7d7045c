"""Questions to many processes at once: answered when all have, or when the time is up."""

import asyncio
import logging
from collections.abc import Callable, Collection

from pdserve.cluster.base.messages import Message, MetricsText, Trace
from pdserve.cluster.base.wire import Channel

logger = logging.getLogger(__name__)

Answer = MetricsText | Trace
Post = Callable[[Channel, Message], None]


class _Inquiry:
    def __init__(self, num_asked: int) -> None:
        self._num_asked = num_asked
        self.answers: list[Answer] = []
        self.all_here = asyncio.Event()
        if num_asked == 0:
            self.all_here.set()

    def take(self, answer: Answer) -> None:
        self.answers.append(answer)
        if len(self.answers) == self._num_asked:
            self.all_here.set()


class Inquiries:
    """Those that are open."""

    def __init__(self, post: Post) -> None:
        """`post` sends, and does not mind a channel that has just closed."""
        self._post = post
        self._open: dict[int, _Inquiry] = {}
        self._num_asked = 0

    async def ask(
        self, peers: Collection[Channel], question: Callable[[int], Message], timeout_s: float
    ) -> list[Answer]:
        """Send everyone `question(number)` and return what came in time."""
        self._num_asked += 1
        number = self._num_asked
        inquiry = self._open[number] = _Inquiry(len(peers))
        try:
            for peer in peers:
                self._post(peer, question(number))
            async with asyncio.timeout(timeout_s):
                await inquiry.all_here.wait()
        except TimeoutError:
            logger.warning("%d of %d processes answered in time", len(inquiry.answers), len(peers))
        finally:
            del self._open[number]
        return inquiry.answers

    def answered(self, answer: Answer) -> None:
        """An answer has come."""
        inquiry = self._open.get(answer.query_id)
        if inquiry is None:
            logger.debug("an answer came too late")
        else:
            inquiry.take(answer)
