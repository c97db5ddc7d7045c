"""What the placement knows of all workers, as arrays: one row a worker, so that a thousand cost no more than ten. Pure.

A report replaces a worker's row. Between two of them *reservations* stand for what was sent to it and is not in a
report yet: each arrival that a report counts ends the oldest one; what never arrived ends with the first report that
comes SETTLE_S after it.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.worker_info import Role, StepFit, WorkerLoad, WorkerState, WorkerView

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Places = NDArray[np.intp]
"""Of workers in the table."""

SETTLE_S = 0.5
SHARE_S = 1.0
"""How often everybody's mean is taken."""
TRUST = 20.0
"""Steps after which a worker's own fit counts as much as that of all workers."""
UNMEASURED = StepFit(base=1e-3, per_token=1e-4, per_row=1e-4, per_context_kilotoken=1e-5, per_kilopair=1e-6)
"""Where nobody has measured anything: only the proportions matter."""


UNMEASURED_TRANSFER = 2e-3, 1e-9
"""Latency, and seconds a byte, where nothing was measured."""
NO_LINK = math.inf, 0.0
LEAST_TRANSFERS = 5.0
"""After so many the fit of a pair is used."""


class Column(IntEnum):
    """What is known of a worker."""

    BASE = 0
    PER_TOKEN = 1
    PER_ROW = 2
    PER_CONTEXT = 3
    """Of one token of context; see StepFit for these terms."""
    PER_PAIR = 4
    QUEUED = 5
    """Prompt tokens to compute."""
    ROWS = 6
    """Sequences that decode, or whose KV is on its way."""
    CONTEXT = 7
    """Tokens of context that they read."""
    ROOM = 8
    """KV tokens that can be had."""
    BUDGET = 9
    """Tokens of a step at most."""
    MAX_ROWS = 10
    TOKEN_BYTES = 11
    """KV of one token."""


NUM_TERMS = 5


@dataclass(frozen=True, slots=True)
class _Reservation:
    time: float
    num_queued: int
    num_rows: int
    num_context: int


class _Pairs:
    """What a decode worker says of the workers it fetches KV from."""

    def __init__(self, load: WorkerLoad) -> None:
        self.laws = {
            fit.source: (fit.latency, fit.per_byte)
            for fit in load.transfer_fits
            if fit.num_observations >= LEAST_TRANSFERS
        }
        self.laws |= {link.peer: NO_LINK for link in load.links if link.state != "open"}


class Fleet:
    """The table. What it returns is by place, and valid until the next change.

    Attributes:
        ids: the worker of each place.
        views: what each last reported.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ids: list[WorkerId] = []
        self.views: list[WorkerView] = []
        self._place_of: dict[WorkerId, int] = {}
        self._reservations: list[deque[_Reservation]] = []
        self._table = np.zeros((8, len(Column)))
        self._fits = np.zeros((8, NUM_TERMS))
        self._weights = np.zeros(8)
        self._flags = np.zeros((8, 3), bool)
        self._shared = np.array(_terms(UNMEASURED))
        self._shared_time = -math.inf
        self._pairs: list[_Pairs | None] = []
        self._usual_transfer = UNMEASURED_TRANSFER

    def __len__(self) -> int:
        """Workers."""
        return len(self.ids)

    def place_of(self, worker_id: WorkerId) -> int | None:
        """Return a worker's place."""
        return self._place_of.get(worker_id)

    def columns(self) -> Sequence[Float64]:
        """Return the columns in the order of Column, [workers] each."""
        return tuple(self._table[: len(self.ids)].T)

    @property
    def is_owner(self) -> Bool:
        """Ready, and owns requests."""
        return self._flag(0)

    @property
    def is_prefill(self) -> Bool:
        """Ready, and prefills for others."""
        return self._flag(1)

    @property
    def is_decode(self) -> Bool:
        """Ready, and lets others prefill for it."""
        return self._flag(2)

    def transfer_laws(self, sink: int, sources: Places) -> list[tuple[float, float]]:
        """Return the latency and the time per byte from each source; the first is infinite without a link."""
        pairs = self._pairs[sink]
        if pairs is None:
            pairs = self._pairs[sink] = _Pairs(self.views[sink].load)
        laws, usual, ids = pairs.laws, self._usual_transfer, self.ids
        return [laws.get(ids[source], usual) for source in sources.tolist()]

    def update(self, view: WorkerView) -> None:
        """A worker has registered, reported, or changed its state."""
        worker_id = view.info.worker_id
        place = self._place_of.get(worker_id)
        if place is None:
            place = self._add(worker_id, view)
        num_arrived = view.load.num_arrivals - self.views[place].load.num_arrivals
        self.views[place] = view
        self._pairs[place] = None
        for fit in view.load.transfer_fits:
            if fit.num_observations >= LEAST_TRANSFERS:
                self._usual_transfer = fit.latency, fit.per_byte
        reservations = self._reservations[place]
        settled = self._clock.now() - SETTLE_S
        while reservations and (num_arrived > 0 or reservations[0].time <= settled):
            reservations.popleft()
            num_arrived -= 1
        self._fill(place)
        if self._clock.now() - self._shared_time >= SHARE_S:
            self._share()
        self._blend(place)

    def remove(self, worker_id: WorkerId) -> None:
        """A worker is gone: the last one takes its place."""
        place = self._place_of.pop(worker_id, None)
        if place is None:
            return
        last = len(self.ids) - 1
        self.ids[place], self.views[place] = self.ids[last], self.views[last]
        self._reservations[place], self._pairs[place] = self._reservations[last], self._pairs[last]
        for items in (self.ids, self.views, self._reservations, self._pairs):
            items.pop()
        if place != last:
            self._place_of[self.ids[place]] = place
            for table in (self._table, self._fits, self._weights, self._flags):
                table[place] = table[last]

    def reserve(self, place: int, *, num_queued: int, num_rows: int, num_context: int) -> None:
        """Something was sent to a worker."""
        self._reservations[place].append(_Reservation(self._clock.now(), num_queued, num_rows, num_context))
        self._table[place, Column.QUEUED] += num_queued
        self._table[place, Column.ROWS] += num_rows
        self._table[place, Column.CONTEXT] += num_context
        self._table[place, Column.ROOM] -= num_context

    def _flag(self, number: int) -> Bool:
        flags: Bool = self._flags[: len(self.ids), number]
        return flags

    def _add(self, worker_id: WorkerId, view: WorkerView) -> int:
        place = self._place_of[worker_id] = len(self.ids)
        self.ids.append(worker_id)
        self.views.append(view)
        self._reservations.append(deque())
        self._pairs.append(None)
        if place == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._fits = np.concatenate([self._fits, np.zeros_like(self._fits)])
            self._weights = np.concatenate([self._weights, np.zeros_like(self._weights)])
            self._flags = np.concatenate([self._flags, np.zeros_like(self._flags)])
        return place

    def _fill(self, place: int) -> None:
        view = self.views[place]
        info, load, fit = view.info, view.load, view.load.step_fit
        self._flags[place] = (
            view.state is WorkerState.READY and info.role.owns_requests,
            view.state is WorkerState.READY and info.role is Role.PREFILL,
            view.state is WorkerState.READY and info.role is Role.DECODE,
        )
        self._fits[place] = _terms(fit)
        self._weights[place] = fit.num_observations
        reserved = self._reservations[place]
        num_context = sum(item.num_context for item in reserved)
        self._table[place, NUM_TERMS:] = (
            load.num_queued_prompt_tokens + sum(item.num_queued for item in reserved),
            load.num_running + load.num_waiting + load.num_receiving + sum(item.num_rows for item in reserved),
            load.num_context_tokens + num_context,
            load.num_free_blocks * info.block_size - num_context,
            info.max_batch_tokens,
            info.max_running,
            info.kv_token_bytes,
        )

    def _blend(self, place: int) -> None:
        """Mix a worker's fit with everybody's, as far as it is not sure of its own."""
        own = self._weights[place] / (self._weights[place] + TRUST)
        self._table[place, :NUM_TERMS] = own * self._fits[place] + (1 - own) * self._shared

    def _share(self) -> None:
        """Take everybody's mean anew."""
        count = len(self.ids)
        fits, weights = self._fits[:count], self._weights[:count]
        whole = weights.sum()
        if not whole:
            return
        self._shared = weights @ fits / whole
        self._shared_time = self._clock.now()
        for place in range(count):
            self._blend(place)


def _terms(fit: StepFit) -> tuple[float, ...]:
    return fit.base, fit.per_token, fit.per_row, fit.per_context_kilotoken / 1000, fit.per_kilopair / 1000
