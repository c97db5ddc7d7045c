"""Server-sent events of a streamed answer."""

import json
import logging
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pdserve.cluster.base.errors import PdserveError
from pdserve.router.answering import Answer
from pdserve.router.answers import Shape
from pdserve.router.http_errors import describe_error
from pdserve.router.json_types import Json

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


async def stream_events(answer: Answer, shape: Shape, *, wants_usage: bool) -> AsyncIterator[bytes]:
    """Yield the events of an answer: chunks, usage if wanted, [DONE]; an error ends the stream without [DONE]."""
    for choice in answer.choices:
        opening = shape.opening(choice.index)
        if opening is not None:
            yield _event(opening)
    try:
        async for item in answer.pieces():
            piece = item.piece
            if piece.text or piece.scores:
                yield _event(shape.chunk(item.index, piece.text, None, piece.scores))
            if piece.finish_reason is not None:
                yield _event(shape.chunk(item.index, "", piece.finish_reason))
    except Exception as error:
        if not isinstance(error, PdserveError):
            logger.exception("a stream failed")
        _, body, _ = describe_error(error)
        yield _event(body)
        return
    if wants_usage:
        yield _event(shape.usage_chunk(answer.usage))
    yield DONE


class ClosingStream(StreamingResponse):
    """A streamed response that calls `close` however it ends, also when it never began."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
