"""Chooses who owns a request and who computes its prompt, jointly, by predicted time. Pure.

For each pair of an owner d and a prefill worker p, and for each owner alone (LOCAL),

    total = room(d) + queue(p) + compute(p) + w · (transfer(p, d) + decode(d) + inflicted)

where compute counts what is cached at p, transfer what is cached at d, decode is the next tokens of the request at d's
load when its prompt will be computed, and inflicted what the sequences that run there lose. All terms but transfer
depend on one of the two: the best SHORTLIST of each side by those terms are paired. Among near-equals chance decides,
so that several ingresses, and requests between two reports, do not all go one way. The shortlist is the decision log.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.cluster.base.clock import Clock, SystemClock
from pdserve.cluster.base.config import PlacementConfig, PlacementPolicy
from pdserve.cluster.base.ids import WorkerId
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.route import Decision, Placeable, Refusal, Route
from pdserve.cluster.base.worker_info import WorkerView
from pdserve.cluster.control.cost_model import StepLaw, Values
from pdserve.cluster.control.decision_log import MOST_CANDIDATES, CandidateTable, DecisionLog
from pdserve.cluster.control.fleet import Column, Fleet, Places
from pdserve.cluster.control.least_loaded import LeastLoaded
from pdserve.cluster.control.prefix_index import PrefixIndex

SHORTLIST = 16
MAX_CANDIDATES = 3
EXPECTED_OUTPUT_TOKENS = 64
"""Tokens that a request is expected to decode, if it may."""
FORESIGHT = 0.1
"""Sequences that a decode worker is going to hold up, for each second in which it computes a prompt, beside those that
run there now: where all else is equal, prompts are for prefill workers."""
NEAR = 0.01
"""Candidates whose totals differ by less of it are equal."""
LEAST_RETRY_S = 1.0
NOWHERE = -1
"""Stands for no prefill worker."""


class Placement(Protocol):
    """Knows the workers; answers where a request goes."""

    def updated(self, view: WorkerView) -> None:
        """A worker has registered, reported, or changed its state."""

    def removed(self, worker_id: WorkerId) -> None:
        """A worker is gone."""

    def cache_changed(self, update: CacheUpdate) -> bool:
        """A worker's prefix cache has changed; False if a snapshot is needed."""

    def choose(self, request: Placeable) -> Route:
        """Return where a request goes, and count it."""

    def decisions(self, client_id: str) -> tuple[Decision, ...]:
        """Return why a client request went where it went, oldest attempt first."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """By worker, [workers]."""

    cached: Values
    room: Values
    decode: Values
    inflicted: Values
    queue: Values
    compute: Values
    local_queue: Values
    local_compute: Values
    local_inflicted: Values


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The candidates of one decision: places of owners and prefill workers, and their totals, [candidates]."""

    owners: Places
    prefills: Places
    """NOWHERE: the owner."""
    transfers: Values
    totals: Values
    order: Places
    """Best first; the chosen one first of all."""


class JointPlacement:
    """Fed with views and cache updates; asked for routes."""

    def __init__(self, settings: PlacementConfig, clock: Clock, source: random.Random) -> None:
        self._settings = settings
        self._random = source
        self.fleet = Fleet(clock)
        self.index = PrefixIndex(clock)
        self.log = DecisionLog(clock)

    def updated(self, view: WorkerView) -> None:
        """A worker has registered, reported, or changed its state."""
        self.index.add_worker(view.info)
        self.fleet.update(view)

    def removed(self, worker_id: WorkerId) -> None:
        """A worker is gone."""
        self.index.remove_worker(worker_id)
        self.fleet.remove(worker_id)

    def cache_changed(self, update: CacheUpdate) -> bool:
        """See PrefixIndex.update."""
        return self.index.update(update)

    def decisions(self, client_id: str) -> tuple[Decision, ...]:
        """Return what is remembered of a client request, oldest first."""
        return self.log.matching(client_id)

    def choose(self, request: Placeable) -> Route:
        """Return up to three owners and three prefill workers, best first, or why there are none; reserve on them."""
        fleet = self.fleet
        allowed = np.ones(len(fleet), bool)
        for worker_id in request.excluded:
            place = fleet.place_of(worker_id)
            if place is not None:
                allowed[place] = False
        owners = np.flatnonzero(fleet.is_owner & allowed)
        prefills = np.flatnonzero(fleet.is_prefill & allowed)
        if not len(owners):
            return Route(worker_ids=(), reason="no worker is ready")
        terms = self._terms(request, prefills)
        shortlist = self._shortlist(request, terms, owners, prefills)
        return self._decide(request, terms, shortlist)

    # Terms.

    def _terms(self, request: Placeable, prefills: Places) -> _Terms:
        base, per_token, per_row, per_context, per_pair, *others = self.fleet.columns()
        queued, rows, context, free, budget, most_rows, _ = others
        law = StepLaw(base, per_token, per_row, per_context, per_pair)
        size = request.num_tokens
        cached = self._cached(request)
        left = size - cached
        prompt = law.prompt_s(left, cached)
        waiting = per_token * queued
        queue = law.steps_s(queued, budget) + waiting
        compute = law.steps_s(left, budget) + prompt
        horizon = max(0, min(request.max_tokens, EXPECTED_OUTPUT_TOKENS) - 1)
        # What decodes when the prompt will be computed: by then some have ended.
        step = law.decode_step_s(rows, context)
        soon = float((queue + compute)[prefills].min()) if len(prefills) else 0.0
        life = EXPECTED_OUTPUT_TOKENS * np.maximum(step, 1e-9)
        staying = np.maximum(0.0, 1.0 - soon / life)
        rows_then, context_then = rows * staying, context * staying
        short = np.maximum(0.0, size + horizon - free - context + context_then)
        room = short * life / np.maximum(context, 1.0) + np.where(
            rows_then + 1.0 > most_rows, life / np.maximum(rows, 1.0), 0.0
        )
        beside = law.beside_s(rows, context)
        return _Terms(
            cached=cached,
            room=room,
            decode=horizon * law.decode_step_s(rows_then + 1.0, context_then + size),
            inflicted=horizon * rows_then * law.row_s(size),
            queue=queue,
            compute=compute,
            local_queue=law.steps_s(queued, budget - rows, beside) + waiting,
            local_compute=law.steps_s(left, budget - rows, beside) + prompt,
            local_inflicted=(rows + FORESIGHT * self.fleet.is_decode) * prompt,
        )

    def _cached(self, request: Placeable) -> Values:
        fleet = self.fleet
        cached = np.zeros(len(fleet))
        for worker_id, num_tokens in self.index.match(request.chains).items():
            place = fleet.place_of(worker_id)
            if place is not None:
                # The last token is always computed.
                cached[place] = min(num_tokens, request.num_tokens - 1)
        return cached

    # Candidates.

    def _shortlist(self, request: Placeable, terms: _Terms, owners: Places, prefills: Places) -> Shortlist:
        weight = self._settings.itl_weight
        after = weight * (terms.decode + terms.inflicted)
        alone = terms.room + terms.local_queue + terms.local_compute + weight * terms.local_inflicted + after
        locals_ = _best(owners, alone)
        totals = [self._guarded(alone[locals_], locals_)]
        chosen_owners, chosen_prefills = [locals_], [np.full(len(locals_), NOWHERE)]
        transfers = [np.zeros(len(locals_))]
        sinks = owners[self.fleet.is_decode[owners]]
        if len(sinks) and len(prefills):
            sinks = _best(sinks, terms.room + after)
            sources = _best(prefills, terms.queue + terms.compute)
            pair_owners, pair_prefills = np.repeat(sinks, len(sources)), np.tile(sources, len(sinks))
            transfer = self._transfers(request, terms, sinks, sources).ravel()
            pairs = (terms.room + after)[pair_owners] + (terms.queue + terms.compute)[pair_prefills]
            totals.append(pairs + weight * transfer)
            chosen_owners.append(pair_owners)
            chosen_prefills.append(pair_prefills)
            transfers.append(transfer)
        total = np.concatenate(totals)
        return Shortlist(
            np.concatenate(chosen_owners),
            np.concatenate(chosen_prefills),
            np.concatenate(transfers),
            total,
            self._order(total),
        )

    def _guarded(self, totals: Values, places: Places) -> Values:
        """Rule out owners whose steps would become too long by a prompt beside their decodes."""
        limit = self._settings.itl_guard_s
        if limit is None:
            return totals
        base, per_token, _, per_context, _, _, rows, context, _, budget, *_ = self.fleet.columns()
        step = base + per_token * budget + per_context * context
        is_long = (step > limit) & (rows > 0) & self.fleet.is_decode
        return np.where(is_long[places], np.inf, totals)

    def _transfers(self, request: Placeable, terms: _Terms, sinks: Places, sources: Places) -> Values:
        """Return how long after the prompt's end the KV is whole, [sinks, sources]; inf without a link."""
        num_bytes = self.fleet.columns()[Column.TOKEN_BYTES][sinks] * (request.num_tokens - terms.cached[sinks])
        laws = np.array([self.fleet.transfer_laws(sink, sources) for sink in sinks.tolist()])
        unhidden = num_bytes[:, None] * laws[:, :, 1] - terms.compute[sources]
        found: Values = laws[:, :, 0] + np.maximum(0.0, unhidden)
        return found

    def _order(self, totals: Values) -> Places:
        order = np.argsort(totals, kind="stable")
        best = totals[order[0]]
        near = int((totals[order] <= best * (1 + NEAR)).sum())
        if near > 1 and np.isfinite(best):
            first = self._random.randrange(near)
            order[[0, first]] = order[[first, 0]]
        return order

    # The decision.

    def _decide(self, request: Placeable, terms: _Terms, shortlist: Shortlist) -> Route:
        fleet = self.fleet
        best = shortlist.order[0]
        owner, prefill = int(shortlist.owners[best]), int(shortlist.prefills[best])
        is_local = prefill == NOWHERE
        compute = (
            (terms.local_queue + terms.local_compute)[owner] if is_local else (terms.queue + terms.compute)[prefill]
        )
        ttft_s = float(terms.room[owner] + compute)
        refusal = self._refusal(request, ttft_s, owner, prefill)
        where = f"{fleet.ids[owner]}, " + ("LOCAL" if is_local else f"prefill by {fleet.ids[prefill]}")
        reason = f"{where}: first token predicted after {ttft_s * 1000:.1f} ms"
        if refusal is not None:
            reason = refusal.reason
        table = self._table(terms, shortlist, is_refused=refusal is not None)
        self.log.add(request, reason, table, len(shortlist.totals))
        if refusal is not None:
            return Route(worker_ids=(), reason=reason, predicted_ttft_s=ttft_s, refusal=refusal)
        self._reserve(request, terms, owner, prefill)
        ordered = shortlist.order.tolist()
        return Route(
            worker_ids=self._first_ids(shortlist.owners, ordered),
            prefill_worker_ids=() if is_local else self._first_ids(shortlist.prefills, ordered),
            reason=reason,
            predicted_ttft_s=ttft_s,
        )

    def _first_ids(self, places: Places, order: Sequence[int]) -> tuple[WorkerId, ...]:
        """Return the first MAX_CANDIDATES different workers."""
        found: dict[int, None] = {}
        for number in order:
            place = int(places[number])
            if place != NOWHERE:
                found[place] = None
                if len(found) == MAX_CANDIDATES:
                    break
        return tuple(self.fleet.ids[place] for place in found)

    def _refusal(self, request: Placeable, ttft_s: float, owner: int, prefill: int) -> Refusal | None:
        limit = request.ttft_limit_s
        if limit is None or request.attempt > 0:
            return None
        error = self.fleet.views[owner if prefill == NOWHERE else prefill].load.step_fit.relative_error
        # As far as the prediction is unsure, it is in favour of the request.
        if ttft_s * (1.0 - min(error, 1.0)) <= limit:
            return None
        return Refusal(
            reason=f"its first token is predicted after {ttft_s * 1000:.0f} ms, its limit is {limit * 1000:g} ms",
            retry_after_s=max(LEAST_RETRY_S, ttft_s - limit),
        )

    def _reserve(self, request: Placeable, terms: _Terms, owner: int, prefill: int) -> None:
        fleet = self.fleet
        worker = owner if prefill == NOWHERE else prefill
        left = int(request.num_tokens - terms.cached[worker])
        if worker != owner:
            fleet.reserve(worker, num_queued=left, num_rows=0, num_context=0)
            left = 0
        fleet.reserve(owner, num_queued=left, num_rows=1, num_context=request.num_tokens)
        # Who comes behind it there finds its prompt. At another owner the KV is only after the transfer: events tell.
        self.index.expect(request.chains, (fleet.ids[worker],))

    def _table(self, terms: _Terms, shortlist: Shortlist, *, is_refused: bool) -> CandidateTable:
        chosen = shortlist.order[:MOST_CANDIDATES]
        owners, prefills = shortlist.owners[chosen], shortlist.prefills[chosen]
        is_local = prefills == NOWHERE
        workers = np.where(is_local, owners, prefills)
        ids = self.fleet.ids
        numbers = (
            terms.room[owners],
            np.where(is_local, terms.local_queue[owners], terms.queue[workers]),
            np.where(is_local, terms.local_compute[owners], terms.compute[workers]),
            shortlist.transfers[chosen],
            terms.decode[owners],
            terms.inflicted[owners] + np.where(is_local, terms.local_inflicted[owners], 0.0),
            terms.cached[owners],
            terms.cached[workers],
            shortlist.totals[chosen],
        )
        return CandidateTable(
            [ids[place] for place in owners],
            [None if place == NOWHERE else ids[place] for place in prefills],
            np.stack(numbers, axis=1),
            is_refused,
        )


def make_placement(settings: PlacementConfig) -> Placement:
    """Return the configured one."""
    if settings.policy is PlacementPolicy.LEAST_LOADED:
        return LeastLoaded()
    return JointPlacement(settings, SystemClock(), random.Random())


def _best(places: Places, costs: Values) -> Places:
    """Return the places of the lowest costs, SHORTLIST at most."""
    if len(places) <= SHORTLIST:
        return places
    return places[np.argpartition(costs[places], SHORTLIST)[:SHORTLIST]]
