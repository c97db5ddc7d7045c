"""Which transport a link takes next. Pure; the clock is injected.

Transports stand in the order of the configuration. One that fails rests: what never opened, for longer each time; what
worked and broke, briefly, and for a minute once it has done so DEMOTION_FAILURES times within that time. The first that
does not rest is taken, so a link that breaks goes on over the next transport, and comes back when the better one has
rested.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.config import TransportKind

BREAK_REST_S = 2.0
DEMOTION_FAILURES, DEMOTION_S = 3, 60.0
MAX_REST_S = 3600.0


@dataclass(slots=True)
class _Record:
    break_times: list[float] = field(default_factory=list)
    num_refusals: int = 0
    rests_until: float = 0.0


class TransportOrder:
    """The transports of one stream."""

    def __init__(self, transports: Sequence[TransportKind], clock: Clock) -> None:
        self._transports = tuple(transports)
        self._clock = clock
        self._records = {transport: _Record() for transport in transports}

    def choose(self) -> TransportKind:
        """Return the transport to take now: if all of them rest, the one whose rest ends first."""
        now = self._clock.now()
        awake = [transport for transport in self._transports if self._records[transport].rests_until <= now]
        return awake[0] if awake else min(self._transports, key=lambda kind: self._records[kind].rests_until)

    @property
    def are_all_resting(self) -> bool:
        """True if what `choose` returns has failed just now: try it after a pause."""
        now = self._clock.now()
        return all(record.rests_until > now for record in self._records.values())

    def refused(self, transport: TransportKind) -> None:
        """A link over this transport never opened."""
        record = self._records[transport]
        record.num_refusals += 1
        rest_s = min(DEMOTION_S * 2 ** (record.num_refusals - 1), MAX_REST_S)
        record.rests_until = self._clock.now() + rest_s

    def broke(self, transport: TransportKind) -> bool:
        """A link over this transport worked, and broke; True if that demotes it."""
        record, now = self._records[transport], self._clock.now()
        record.break_times = [time for time in record.break_times if now - time < DEMOTION_S] + [now]
        is_demoted = len(record.break_times) >= DEMOTION_FAILURES
        record.rests_until = now + (DEMOTION_S if is_demoted else BREAK_REST_S)
        return is_demoted

    def opened(self, transport: TransportKind) -> None:
        """A link over this transport passed its test."""
        self._records[transport].num_refusals = 0

    def is_better(self, transport: TransportKind, other: TransportKind) -> bool:
        """True if `transport` comes before `other` in the configuration."""
        return self._transports.index(transport) < self._transports.index(other)
