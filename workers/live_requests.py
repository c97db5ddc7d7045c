"""The requests a worker holds, and the channel each one's tokens go to. Pure.

    LIVE ── channel closes ──▶ ORPHANED ── reclaimed in time ──▶ LIVE
                                  └────── not reclaimed ────────▶ dropped (the engine aborts it)

Emitted tokens are kept for a while after the ending was sent: what was written to a connection that then broke may not
have arrived. So a reclaiming ingress misses nothing and gets nothing twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.cluster.base.ids import AttemptKey
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta

ChannelId = int


@dataclass(slots=True)
class _Live:
    channel: ChannelId | None
    next_index: int
    deltas: list[TokenDelta] = field(default_factory=list)
    ending: TokenDelta | None = None
    orphaned_time: float = 0.0
    ended_time: float = 0.0


class LiveRequests:
    """Routes token deltas to channels."""

    def __init__(self, *, reclaim_s: float, keep_s: float) -> None:
        self._reclaim_s = reclaim_s
        self._keep_s = keep_s
        self._live: dict[AttemptKey, _Live] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return sum(live.ending is None for live in self._live.values())

    def add(self, request: Request, channel: ChannelId) -> bool:
        """Take a request in; False if that attempt is already here."""
        key = (request.request_id, request.attempt)
        if key in self._live:
            return False
        self._live[key] = _Live(channel, next_index=len(request.resume_token_ids))
        return True

    def is_live(self, key: AttemptKey) -> bool:
        """True if the request is here and has not ended."""
        live = self._live.get(key)
        return live is not None and live.ending is None

    def channel_of(self, key: AttemptKey) -> ChannelId | None:
        """Return where the request's tokens go now; None if nowhere."""
        live = self._live.get(key)
        return None if live is None else live.channel

    def drop(self, key: AttemptKey) -> bool:
        """Forget a request; False if it was not here, or had ended."""
        live = self._live.pop(key, None)
        return live is not None and live.ending is None

    def deliver(self, deltas: Iterable[TokenDelta], now: float) -> dict[ChannelId, list[TokenDelta]]:
        """Record deltas; return what to send, by channel. Deltas of unknown requests are dropped."""
        outgoing: dict[ChannelId, list[TokenDelta]] = {}
        for delta in deltas:
            key = (delta.request_id, delta.attempt)
            live = self._live.get(key)
            if live is None or live.ending is not None:
                continue
            live.deltas.append(delta)
            live.next_index = delta.index + len(delta.token_ids)
            if delta.finish_reason is not None:
                live.ending, live.ended_time = delta, now
            if live.channel is not None:
                outgoing.setdefault(live.channel, []).append(delta)
        return outgoing

    def channel_closed(self, channel: ChannelId, now: float) -> int:
        """Orphan the channel's requests; return how many."""
        orphans = [live for live in self._live.values() if live.channel == channel]
        for live in orphans:
            live.channel = None
            live.orphaned_time = now
        return len(orphans)

    def reclaim(self, key: AttemptKey, channel: ChannelId, next_index: int) -> list[TokenDelta] | None:
        """Attach a request to a new channel; return what it has not seen, or None if the request is not here.

        What is returned may begin before `next_index`: the receiver cuts off what it knows.
        """
        live = self._live.get(key)
        if live is None:
            return None
        first = live.deltas[0].index if live.deltas else live.next_index
        if not first <= next_index <= live.next_index:
            return None
        live.channel = channel
        return [
            delta
            for delta in live.deltas
            if delta.index + len(delta.token_ids) > next_index or delta.finish_reason is not None
        ]

    def reap(self, now: float) -> list[AttemptKey]:
        """Drop the requests that nobody reclaimed in time; return those that run, so that the engine aborts them."""
        overdue = [
            key
            for key, live in self._live.items()
            if live.channel is None and now - live.orphaned_time >= self._reclaim_s
        ]
        running = [key for key in overdue if self._live[key].ending is None]
        for key in overdue:
            del self._live[key]
        return running

    def forget_ended(self, now: float) -> None:
        """Forget what ended long enough ago."""
        overdue = [
            key
            for key, live in self._live.items()
            if live.ending is not None and live.channel is not None and now - live.ended_time >= self._keep_s
        ]
        for key in overdue:
            del self._live[key]

    def fail_all(self, cause: str, now: float) -> dict[ChannelId, list[TokenDelta]]:
        """End every request with an error; return what to send, by channel."""
        endings = [
            TokenDelta(
                request_id=request_id,
                attempt=attempt,
                index=live.next_index,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=cause,
                is_retryable=True,
            )
            for (request_id, attempt), live in self._live.items()
            if live.ending is None
        ]
        return self.deliver(endings, now)
