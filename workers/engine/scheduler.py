"""The scheduler: which tokens the next step computes.

There is no prefill phase and no decode phase, only tokens still to compute. Each step fills a token budget: sequences
with one token left first (they decode), then the others in order of arrival (prefill chunks), then new admissions.
Pure: no I/O, no torch, no clock but the injected one.

Blocks are bound as a sequence grows. When none is free the youngest running sequence is put back and recomputed later.
No deadlock: a request whose worst case exceeds the pool is refused on arrival, so the oldest running sequence can
always finish once the younger ones are put back, and reservations end without its help (they join, and are then the
youngest, or fail by their own deadlines).
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

import numpy as np

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.errors import InvalidRequestError, OverloadedError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta
from pdserve.workers.engine.block_pool import BlockLists, BlockPool
from pdserve.workers.engine.plan import Int32, StepPlan
from pdserve.workers.engine.reservation import Reservation, Reservations
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence, SequenceState, blocks_for, worst_case_tokens

Key = tuple[RequestId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits of the scheduler."""

    block_size: int
    max_running: int
    max_batch_tokens: int
    max_waiting: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrefill:
    """What the present plan computes of a prefill-only sequence; `blocks` are its tables, one list per group."""

    request_id: RequestId
    first_token: int
    end_token: int
    blocks: BlockLists


class Scheduler:
    """Owns the sequences of a worker and their blocks.

    Attributes:
        num_preemptions, num_prefilled_tokens, num_sampled_tokens, num_queued_prompt_tokens: for load reports; plain
            integers, so another thread may read them.
    """

    def __init__(self, settings: SchedulerSettings, pool: BlockPool, clock: Clock) -> None:
        self._settings = settings
        self._pool = pool
        self._clock = clock
        # Both in order of arrival; a request that joins with its KV arrives when it joins.
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sequences: dict[Key, Sequence] = {}
        self._planned: dict[Sequence, int] = {}
        self._tables = RowTables(
            num_rows=settings.max_running,
            num_groups=pool.num_groups,
            num_blocks=blocks_for(settings.max_model_len, settings.block_size),
        )
        self.reservations = Reservations(pool, self._tables, settings.block_size)
        self._num_arrivals = 0
        self._queue_times: list[float] = []
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0
        self.num_sampled_tokens = 0
        self.num_queued_prompt_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the running batch."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True if a sequence is not finished."""
        return bool(self._sequences)

    def check(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Raise InvalidRequestError if the request can never run here. From any thread."""
        worst = worst_case_tokens(request)
        if is_prefill_only:
            worst = len(request.prompt_token_ids) + len(request.resume_token_ids) + 1
        capacity = min(self._settings.max_model_len, self._pool.num_blocks * self._settings.block_size)
        if worst > capacity:
            raise InvalidRequestError(
                f"prompt and max_tokens need {worst} tokens, this worker holds {capacity}", param="max_tokens"
            )
        if not request.prompt_token_ids or len(request.resume_token_ids) >= request.sampling.max_tokens:
            raise InvalidRequestError("nothing to compute: empty prompt or no token left to sample", param="prompt")

    def add(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Queue a request. Raises InvalidRequestError if it can never run, OverloadedError if the queue is full."""
        self.check(request, is_prefill_only=is_prefill_only)
        self._refuse_copy(request)
        # Requests that the next step can admit do not count as waiting.
        num_queued = len(self._waiting) + len(self._running) - self._settings.max_running
        if num_queued >= self._settings.max_waiting:
            raise OverloadedError(f"{num_queued} requests are waiting, the most allowed")
        self._waiting.append(self._arrive(request, is_prefill_only=is_prefill_only))

    def join(self, request: Request, reservation: Reservation, num_computed_tokens: int) -> None:
        """Take a request in whose first `num_computed_tokens` have their KV in the reservation's blocks.

        The reservation ends here. Raises InvalidRequestError if the request is here already; then it does not.
        """
        sequence = self._arrive(request, is_prefill_only=False)
        assert num_computed_tokens < sequence.num_tokens, "the last token is always computed here"
        self.reservations.joined(reservation)
        sequence.blocks = reservation.blocks
        sequence.num_computed_tokens = num_computed_tokens
        self.num_queued_prompt_tokens -= num_computed_tokens
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, reservation.row, 0, blocks)
        self._run(sequence, reservation.row)

    def _refuse_copy(self, request: Request) -> None:
        key = (request.request_id, request.attempt)
        if key in self._sequences:
            raise InvalidRequestError(f"request {key} is already here", param="request_id")

    def _arrive(self, request: Request, *, is_prefill_only: bool) -> Sequence:
        self._refuse_copy(request)
        sequence = Sequence(
            request,
            num_groups=self._pool.num_groups,
            arrival_no=self._num_arrivals,
            arrival_time=self._clock.now(),
            is_prefill_only=is_prefill_only,
        )
        self._num_arrivals += 1
        self._sequences[request.request_id, request.attempt] = sequence
        self.num_queued_prompt_tokens += sequence.num_remaining_tokens
        return sequence

    def abort(self, request_id: RequestId, attempt: int) -> bool:
        """Drop a request and free its blocks; False if it is not here. Called between steps only."""
        sequence = self._sequences.get((request_id, attempt))
        if sequence is None:
            return False
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        self._finish(sequence)
        return True

    def schedule(self) -> StepPlan | None:
        """Return the next step's plan, or None if nothing can be computed."""
        assert not self._planned, "the last plan was not finished by update"
        budget = self._settings.max_batch_tokens
        decoding = [sequence for sequence in self._running if sequence.num_remaining_tokens == 1]
        prefilling = [sequence for sequence in self._running if sequence.num_remaining_tokens > 1]
        for sequence in (*decoding, *prefilling):
            # A sequence may have been put back for the sake of an older one in this very loop.
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                budget += self._plan_running(sequence, budget)
        while self._waiting and budget > 0 and self._can_admit(self._waiting[0]):
            num_scheduled = self._admit(self._waiting[0], budget)
            if num_scheduled == 0:
                break
            budget -= num_scheduled
        return self._build_plan() if self._planned else None

    def update(self, token_ids: Int32) -> list[TokenDelta]:
        """Take the sampled tokens of the last plan, in its row order; return what is new, endings included."""
        deltas = []
        sampled = iter(token_ids)
        planned, self._planned = self._planned, {}
        for sequence, num_scheduled in planned.items():
            num_prompt_left = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            self.num_prefilled_tokens += min(num_scheduled, num_prompt_left)
            sequence.num_computed_tokens += num_scheduled
            self.num_queued_prompt_tokens -= num_scheduled
            if sequence.num_remaining_tokens == 0:
                deltas.append(self._take(sequence, int(next(sampled))))
        return deltas

    def _take(self, sequence: Sequence, token_id: int) -> TokenDelta:
        request = sequence.request
        index = sequence.num_output_tokens
        sequence.append(token_id)
        self.num_queued_prompt_tokens += 1
        self.num_sampled_tokens += 1
        reason = self._finish_reason(sequence, token_id)
        if reason is not None or sequence.is_prefill_only:
            self._finish(sequence)
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            sample=0,
            index=index,
            token_ids=(token_id,),
            finish_reason=reason,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        is_eos = not sampling.ignore_eos and token_id in self._settings.eos_token_ids
        if is_eos or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if sequence.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _plan_running(self, sequence: Sequence, budget: int) -> int:
        """Plan the sequence's next tokens, putting younger ones back for blocks; return the change of the budget."""
        num_scheduled = min(sequence.num_remaining_tokens, budget)
        returned = 0
        while not self._bind_blocks(sequence, num_scheduled):
            victim = self._running[-1]
            if victim is sequence:
                # Nothing younger is left: wait for the older ones to finish.
                return returned
            returned += self._preempt(victim)
        self._planned[sequence] = num_scheduled
        return returned - num_scheduled

    def _bind_blocks(self, sequence: Sequence, num_scheduled: int) -> bool:
        """Give a sequence that has a slot the blocks for its next tokens; False if they cannot be had."""
        missing = self._blocks_missing(sequence, num_scheduled)
        if missing <= 0:
            return True
        new = self._pool.allocate(missing)
        if new is None:
            return False
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, sequence.slot, len(blocks), new[group])
            blocks.extend(new[group])
        return True

    def _blocks_missing(self, sequence: Sequence, num_scheduled: int) -> int:
        needed = blocks_for(sequence.num_computed_tokens + num_scheduled, self._settings.block_size)
        return needed - len(sequence.blocks[0])

    def _can_admit(self, sequence: Sequence) -> bool:
        needed = blocks_for(sequence.num_tokens + 1, self._settings.block_size)
        return self._tables.has_free_row and needed <= self._unbound_blocks()

    def _unbound_blocks(self) -> int:
        """Free blocks less those that running prefills still need for what they already know."""
        promised = sum(
            self._blocks_missing(sequence, sequence.num_remaining_tokens)
            for sequence in self._running
            if sequence.num_remaining_tokens > 1
        )
        return self._pool.num_available - promised

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Run the first waiting sequence; return the tokens planned, 0 if a reservation was quicker."""
        row = self._tables.take_row()
        if row is None:
            return 0
        sequence.slot = row
        num_scheduled = min(sequence.num_remaining_tokens, budget)
        if not self._bind_blocks(sequence, num_scheduled):
            sequence.slot = None
            self._tables.return_row(row)
            return 0
        self._waiting.popleft()
        self._run(sequence, row)
        self._planned[sequence] = num_scheduled
        return num_scheduled

    def _run(self, sequence: Sequence, row: int) -> None:
        sequence.slot = row
        self._tables.fill_row(row, sequence.request.sampling)
        sequence.state = SequenceState.RUNNING
        if sequence.admitted_time is None:
            sequence.admitted_time = self._clock.now()
            self._queue_times.append(sequence.admitted_time - sequence.arrival_time)
        # It may be older than what has joined since it arrived.
        insort(self._running, sequence, key=_arrival_no)

    def _preempt(self, sequence: Sequence) -> int:
        """Put a running sequence back; return the budget that its planned tokens had taken."""
        self._release(sequence)
        self.num_queued_prompt_tokens += sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_arrival_no)
        self.num_preemptions += 1
        return self._planned.pop(sequence, 0)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence)
        sequence.state = SequenceState.FINISHED
        self.num_queued_prompt_tokens -= sequence.num_remaining_tokens
        del self._sequences[sequence.request.request_id, sequence.request.attempt]

    def _release(self, sequence: Sequence) -> None:
        """Return everything that admission and planning took."""
        assert sequence.slot is not None
        self._running.remove(sequence)
        for group, blocks in enumerate(sequence.blocks):
            self._pool.release(group, blocks)
            blocks.clear()
        self._tables.return_row(sequence.slot)
        sequence.slot = None

    def _build_plan(self) -> StepPlan:
        rows = list(self._planned.items())
        lengths = np.fromiter((num_scheduled for _, num_scheduled in rows), np.int32, len(rows))
        row_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=row_starts[1:])
        firsts = np.fromiter((sequence.num_computed_tokens for sequence, _ in rows), np.int32, len(rows))
        positions = np.arange(row_starts[-1], dtype=np.int32) + np.repeat(firsts - row_starts[:-1], lengths)
        token_ids = np.concatenate(
            [sequence.tokens[first : first + length] for (sequence, length), first in zip(rows, firsts, strict=True)]
        )
        samples = [row for row, (sequence, length) in enumerate(rows) if length == sequence.num_remaining_tokens]
        slots = np.fromiter((sequence.slot for sequence, _ in rows), np.intp, len(rows))
        outputs = np.fromiter((rows[row][0].num_output_tokens for row in samples), np.int64, len(samples))
        return StepPlan(
            token_ids=token_ids,
            positions=positions,
            row_starts=row_starts,
            block_tables=self._tables.block_tables(slots, max(len(sequence.blocks[0]) for sequence, _ in rows)),
            sample_rows=np.array(samples, np.int32),
            sampling=self._tables.sampling(slots[samples], outputs),
        )

    def planned_prefills(self) -> list[PlannedPrefill]:
        """Return the prefill-only sequences of the present plan."""
        return [
            PlannedPrefill(
                request_id=sequence.request.request_id,
                first_token=sequence.num_computed_tokens,
                end_token=sequence.num_computed_tokens + num_scheduled,
                blocks=sequence.blocks,
            )
            for sequence, num_scheduled in self._planned.items()
            if sequence.is_prefill_only
        ]

    def take_queue_times(self) -> list[float]:
        """Return how long each request admitted since the last call had waited for its first admission."""
        times, self._queue_times = self._queue_times, []
        return times

    def validate(self) -> None:
        """Check every invariant; for tests, after each step."""
        self._pool.validate()
        for group in range(self._pool.num_groups):
            held = [block for sequence in self._running for block in sequence.blocks[group]]
            held += self.reservations.held(group)
            counts = np.bincount(np.array(held, np.intp), minlength=self._pool.num_blocks) + self._pool.pins(group)
            assert (counts == self._pool.references(group)).all(), f"group {group}: references do not add up"
        for queue in (self._running, self._waiting):
            arrivals = [sequence.arrival_no for sequence in queue]
            assert arrivals == sorted(arrivals), "order of arrival is lost"
        assert len(self._running) + len(self._waiting) == len(self._sequences), "a sequence is lost"
        queued = sum(sequence.num_remaining_tokens for sequence in self._sequences.values())
        assert queued == self.num_queued_prompt_tokens, (
            f"{queued} tokens queued, counted {self.num_queued_prompt_tokens}"
        )
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.slot is not None
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens <= len(sequence.tokens)
            enough = blocks_for(sequence.num_computed_tokens, self._settings.block_size)
            assert all(len(blocks) >= enough for blocks in sequence.blocks), "KV without a block"
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING
            assert sequence.slot is None
            assert not any(sequence.blocks), "a waiting sequence holds blocks"
        self._tables.validate(num_taken=len(self._running) + len(self.reservations))


def _arrival_no(sequence: Sequence) -> int:
    return sequence.arrival_no
