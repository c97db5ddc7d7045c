"""Whose tokens come first: the order of prompts to compute, who may take another's place, who is put back.

A strategy is asked by the scheduler and told what happened; it holds no sequence and makes no plan. `rank` orders the
running batch: whoever needs blocks takes them from a sequence behind it, so the first one always finishes.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from pdserve.workers.engine.sequence import Sequence, SequenceState

Rank = tuple[float, int]
INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
MOST_TENANTS = 10_000
"""Counters kept; beyond that those of tenants without a waiting request are forgotten."""


class Strategy(Protocol):
    """What the scheduler asks. Sequences are given in order of arrival."""

    allows_skips: bool
    """True if a request may pass one that does not fit."""
    displaces: bool
    """True if a waiting request may take a running one's place."""

    def order(self, sequences: Items[Sequence]) -> Iterator[Sequence]:
        """Yield running prefills and waiting requests, the next one to compute first; asked again after each."""

    def rank(self, sequence: Sequence) -> Rank:
        """Return the place in the running batch; constant while the sequence lives."""

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """True if the first may take the second's place."""

    def arrived(self, sequence: Sequence) -> None:
        """A request has come."""

    def admitted(self, sequence: Sequence, num_prompt_tokens: int) -> None:
        """Its first admission; so many tokens of its prompt are computed for it."""

    def generated(self, sequence: Sequence) -> None:
        """It has a new token."""

    def ended(self, sequence: Sequence) -> None:
        """It is finished or aborted."""


class _Static:
    """Orders by a rank that does not change."""

    allows_skips = True
    displaces = False

    def order(self, sequences: Items[Sequence]) -> Iterator[Sequence]:
        return iter(sorted(sequences, key=self.urgency))

    def urgency(self, sequence: Sequence) -> Rank:
        return self.rank(sequence)

    def rank(self, sequence: Sequence) -> Rank:
        return (0.0, sequence.arrival_no)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def arrived(self, sequence: Sequence) -> None:
        """Nothing to count."""

    def admitted(self, sequence: Sequence, num_prompt_tokens: int) -> None:
        """Nothing to count."""

    def generated(self, sequence: Sequence) -> None:
        """Nothing to count."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing to count."""


class FirstCome(_Static):
    """In order of arrival."""

    def order(self, sequences: Items[Sequence]) -> Iterator[Sequence]:
        """See Strategy."""
        return iter(sequences)


class Priority(_Static):
    """Lower `priority` first, then arrival. A strictly more urgent request takes a running one's place."""

    displaces = True

    def rank(self, sequence: Sequence) -> Rank:
        """See Strategy."""
        return (float(sequence.request.priority), sequence.arrival_no)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """See Strategy."""
        return waiting.request.priority < running.request.priority


class ShortestPrefill(_Static):
    """Fewest prompt tokens left first; a second of waiting counts like `ageing_tokens_per_s` tokens less.

    So a long prompt of n tokens is passed by those only that arrive within n / ageing_tokens_per_s seconds.
    """

    def __init__(self, ageing_tokens_per_s: float) -> None:
        self._ageing = ageing_tokens_per_s

    def urgency(self, sequence: Sequence) -> Rank:
        """Everyone ages alike, so the order does not depend on the present time."""
        return (sequence.num_remaining_tokens + self._ageing * sequence.arrival_time, sequence.arrival_no)


class Fair(_Static):
    """The tenant that has been served least comes first: virtual token counters (Sheng et al., OSDI 2024).

    A tenant's counter grows by its prompt tokens that are computed, at admission, and by twice its output tokens, both
    divided by its weight. One that comes back is lifted to the least of those that wait: absence earns no credit.
    Between two tenants that always have requests waiting, service per weight differs by at most 2 max(L, 2 M), L being
    the longest prompt and M the tokens that a batch holds.
    """

    allows_skips = False

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._last_counter = 0.0

    def counter(self, tenant: str) -> float:
        """Return the service a tenant has had, per weight."""
        return self._counters.get(tenant, 0.0)

    def order(self, sequences: Items[Sequence]) -> Iterator[Sequence]:
        """See Strategy."""
        queues: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.state is SequenceState.RUNNING:
                yield sequence
            else:
                queues.setdefault(sequence.request.tenant, []).append(sequence)
        for queue in queues.values():
            queue.reverse()
        while queues:
            tenant = min(queues, key=lambda name: (self.counter(name), queues[name][-1].arrival_no))
            yield queues[tenant].pop()
            if not queues[tenant]:
                del queues[tenant]

    def arrived(self, sequence: Sequence) -> None:
        """See Strategy."""
        tenant = sequence.request.tenant
        if not self._num_waiting.get(tenant):
            waiting = [self.counter(name) for name in self._num_waiting]
            self._counters[tenant] = max(self.counter(tenant), min(waiting, default=self._last_counter))
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def admitted(self, sequence: Sequence, num_prompt_tokens: int) -> None:
        """See Strategy."""
        self._charge(sequence.request.tenant, INPUT_WEIGHT * num_prompt_tokens)
        self._left_queue(sequence.request.tenant)

    def generated(self, sequence: Sequence) -> None:
        """See Strategy."""
        self._charge(sequence.request.tenant, OUTPUT_WEIGHT)

    def ended(self, sequence: Sequence) -> None:
        """See Strategy."""
        if sequence.admitted_time is None:
            self._left_queue(sequence.request.tenant)
        if len(self._counters) > MOST_TENANTS:
            # Whoever comes back without a counter is lifted to those that wait, and earns nothing by it.
            self._counters = {name: self.counter(name) for name in self._num_waiting}

    def _charge(self, tenant: str, service: float) -> None:
        self._counters[tenant] = self.counter(tenant) + service / self._weights.get(tenant, 1.0)

    def _left_queue(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last_counter = self.counter(tenant)
