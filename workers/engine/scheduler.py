"""The scheduler: which tokens the next step computes.

There is no prefill phase and no decode phase, only tokens still to compute. Each step fills a token budget: sequences
with one token left first (they decode), then the others in order of arrival (prefill chunks), then new admissions.
Pure: no I/O, no torch, no clock but the injected one.

Blocks are bound as a sequence grows; what the prefix cache holds of it is taken over at admission, and the blocks that
a window has left are released. When none is free the youngest running sequence is put back and recomputed later.
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
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import PrefixHash, PrefixIdentity, extend_chain
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta, TokenLogprobs
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists, BlockPool, Counts
from pdserve.workers.engine.logit_rules import LogitRules, has_rules
from pdserve.workers.engine.plan import Int32, ScoredTokens, StepOutput, StepPlan
from pdserve.workers.engine.prefix_cache import FirstBlocks
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
    has_prefix_cache: bool = True


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
        num_admitted_prompt_tokens, num_cached_prompt_tokens: prompt tokens of requests at their first admission, and
            those of them that the prefix cache had.
        num_recomputed_tokens: tokens computed again after a preemption.
    """

    def __init__(
        self, settings: SchedulerSettings, pool: BlockPool, layout: KVLayout, identity: PrefixIdentity, clock: Clock
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._layout = layout
        self._identity = identity
        self._firsts = FirstBlocks(layout)
        self._clock = clock
        # Both in order of arrival; a request that joins with its KV arrives when it joins.
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._sequences: dict[Key, Sequence] = {}
        self._planned: dict[Sequence, int] = {}
        self._scored: list[Sequence] = []
        self._groups = range(pool.num_groups)
        self._window_groups = [group for group in range(pool.num_groups) if self._firsts.has_window(group)]
        self._tables = RowTables(
            num_rows=settings.max_running,
            num_groups=pool.num_groups,
            num_blocks=blocks_for(settings.max_model_len, settings.block_size),
        )
        self.reservations = Reservations(pool, self._tables, self._firsts, settings.block_size)
        self._num_arrivals = 0
        self._queue_times: list[float] = []
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0
        self.num_sampled_tokens = 0
        self.num_queued_prompt_tokens = 0
        self.num_admitted_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.num_recomputed_tokens = 0

    @property
    def max_batch_tokens(self) -> int:
        """Token budget of a step."""
        return self._settings.max_batch_tokens

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
        capacity = self._settings.max_model_len
        for group, num_blocks in enumerate(self._pool.num_blocks):
            if self._firsts.most_blocks(group, worst, self._settings.max_batch_tokens) > num_blocks:
                capacity = min(capacity, num_blocks * self._settings.block_size)
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
        assert reservation.is_bound, "its blocks are only promised"
        sequence.blocks = reservation.blocks
        sequence.num_computed_tokens = num_computed_tokens
        self.num_queued_prompt_tokens -= num_computed_tokens
        sequence.num_cached_tokens = self._count_hit(
            sequence, reservation.num_cached_blocks * self._settings.block_size
        )
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, reservation.row, 0, blocks)
        # What arrives of a group with a window begins where the window does, in the middle of a block.
        self._publish(sequence, [self._firsts.whole_at_token(group, num_computed_tokens) for group in self._groups])
        self._leave_window(sequence)
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
            root=self._identity.root(salt=request.cache_salt),
            rules=self._rules_of(request),
            arrival_no=self._num_arrivals,
            arrival_time=self._clock.now(),
            is_prefill_only=is_prefill_only,
        )
        self._num_arrivals += 1
        self._sequences[request.request_id, request.attempt] = sequence
        self.num_queued_prompt_tokens += sequence.num_remaining_tokens
        return sequence

    def _rules_of(self, request: Request) -> LogitRules | None:
        sampling = request.sampling
        if not has_rules(sampling):
            return None
        ends = () if sampling.ignore_eos else self._settings.eos_token_ids
        return LogitRules(sampling, request.prompt_token_ids, request.resume_token_ids, ends)

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
        while self._waiting and budget > 0:
            num_scheduled = self._admit(self._waiting[0], budget)
            if num_scheduled == 0:
                break
            budget -= num_scheduled
        return self._build_plan() if self._planned else None

    def update(self, output: StepOutput) -> list[TokenDelta]:
        """Take what the last plan produced, in its order; return what is new, endings included."""
        deltas = []
        tokens = iter(output.token_ids.tolist())
        logprobs = iter(output.logprobs)
        for sequence, score in zip(self._scored, output.scores, strict=True):
            sequence.prompt_logprobs.append(score)
        planned, self._planned = self._planned, {}
        for sequence, num_scheduled in planned.items():
            num_prompt_left = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            self.num_prefilled_tokens += min(num_scheduled, num_prompt_left)
            sequence.num_computed_tokens += num_scheduled
            self.num_queued_prompt_tokens -= num_scheduled
            self._publish(sequence)
            self._leave_window(sequence)
            if sequence.num_remaining_tokens == 0:
                deltas.append(self._take(sequence, next(tokens), next(logprobs, None)))
        return deltas

    def _take(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenDelta:
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
            num_cached_tokens=sequence.num_cached_tokens if index == sequence.num_resume_tokens else 0,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if index == 0 else (),
        )

    def _publish(self, sequence: Sequence, first_whole: Counts | None = None) -> None:
        """Let the prefix cache serve the blocks that have become whole, from `first_whole` of each group on."""
        count = sequence.num_computed_tokens // self._settings.block_size
        if count <= sequence.num_published_blocks or not self._settings.has_prefix_cache:
            return
        names = sequence.names(sequence.num_computed_tokens, self._settings.block_size)
        for number in range(sequence.num_published_blocks, count):
            for group, blocks in enumerate(sequence.blocks):
                is_whole = first_whole is None or number >= first_whole[group]
                if is_whole and blocks[number] != NO_BLOCK:
                    self._pool.publish(group, blocks[number], names[number])
        sequence.num_published_blocks = count

    def _leave_window(self, sequence: Sequence) -> None:
        """Release the blocks that no later token of the sequence sees."""
        for group in self._window_groups:
            held, first = sequence.first_blocks[group], self._firsts.at_token(group, sequence.num_computed_tokens)
            if first > held:
                blocks = sequence.blocks[group]
                self._pool.release(group, blocks[held:first])
                blocks[held:first] = [NO_BLOCK] * (first - held)
                sequence.first_blocks[group] = first

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
        new = self._pool.allocate([missing] * self._pool.num_groups)
        if new is None:
            return False
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, sequence.slot, len(blocks), new[group])
            blocks.extend(new[group])
        return True

    def _blocks_missing(self, sequence: Sequence, num_scheduled: int) -> int:
        needed = blocks_for(sequence.num_computed_tokens + num_scheduled, self._settings.block_size)
        # By logical number, so equal in every group.
        return needed - len(sequence.blocks[0])

    def _has_room(self, sequence: Sequence) -> bool:
        """True if what is known of a sequence fits beside what running prefills still need."""
        end = blocks_for(sequence.num_tokens + 1, self._settings.block_size)
        return all(
            self._missing_at_most(group, sequence, end) + self._owed(group) <= self._pool.num_available(group)
            for group in range(self._pool.num_groups)
        )

    def _owed(self, group: int) -> int:
        """Return the blocks that running prefills still need for what they already know."""
        return sum(
            self._missing_at_most(group, sequence, blocks_for(sequence.num_tokens, self._settings.block_size))
            for sequence in self._running
            if sequence.num_remaining_tokens > 1
        )

    def _missing_at_most(self, group: int, sequence: Sequence, end: int) -> int:
        """Return how many blocks a sequence adds in a group until it has `end`; windows give some back meanwhile."""
        held = sequence.blocks[group]
        num_held = len(held) - sequence.first_blocks[group]
        most = self._firsts.most_blocks(group, end * self._settings.block_size, self._settings.max_batch_tokens)
        return max(0, min(end - len(held), most - num_held))

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Run the first waiting sequence if it fits; return the tokens planned, 0 if it does not fit now."""
        row = self._tables.take_row()
        if row is None:
            return 0
        sequence.slot = row
        self._take_prefix(sequence)
        num_scheduled = min(sequence.num_remaining_tokens, budget)
        if not (self._has_room(sequence) and self._bind_blocks(sequence, num_scheduled)):
            self._give_back(sequence)
            self._tables.return_row(row)
            sequence.slot = None
            return 0
        num_hit_tokens = sequence.num_computed_tokens
        if sequence.admitted_time is None:
            sequence.num_cached_tokens = self._count_hit(sequence, num_hit_tokens)
        else:
            self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_hit_tokens)
        self._waiting.popleft()
        self._run(sequence, row)
        self._planned[sequence] = num_scheduled
        return num_scheduled

    def _take_prefix(self, sequence: Sequence) -> None:
        """Take over what the prefix cache holds of a sequence that has a slot; its last token is always computed."""
        # A prompt that is scored needs the hidden state of each of its tokens.
        if not self._settings.has_prefix_cache or sequence.num_unscored_tokens:
            return
        names = sequence.names(sequence.num_tokens - 1, self._settings.block_size)
        sequence.blocks = self._pool.acquire_prefix(names, self._firsts)
        num_blocks = len(sequence.blocks[0])
        sequence.num_computed_tokens = num_blocks * self._settings.block_size
        sequence.num_published_blocks = num_blocks
        self.num_queued_prompt_tokens -= sequence.num_computed_tokens
        assert sequence.slot is not None
        for group, blocks in enumerate(sequence.blocks):
            sequence.first_blocks[group] = self._firsts.at_block(group, num_blocks)
            self._tables.extend(group, sequence.slot, 0, blocks)

    def _give_back(self, sequence: Sequence) -> None:
        """Release a sequence's blocks; what it has computed counts as to be computed again."""
        for group, blocks in enumerate(sequence.blocks):
            self._pool.release(group, blocks)
            blocks.clear()
            sequence.first_blocks[group] = 0
        self.num_queued_prompt_tokens += sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0

    def _count_hit(self, sequence: Sequence, num_hit_tokens: int) -> int:
        """Count a first admission; return the prompt tokens that were cached."""
        num_cached = min(num_hit_tokens, sequence.num_prompt_tokens)
        self.num_admitted_prompt_tokens += sequence.num_prompt_tokens
        self.num_cached_prompt_tokens += num_cached
        return num_cached

    def prefix_names(self, request: Request) -> list[PrefixHash]:
        """Return the names of the request's blocks that may be taken from the prefix cache. From any thread."""
        if not self._settings.has_prefix_cache:
            return []
        tokens = np.array(request.prompt_token_ids + request.resume_token_ids, np.int32)
        names: list[PrefixHash] = []
        root = self._identity.root(salt=request.cache_salt)
        extend_chain(names, root, tokens, len(tokens) - 1, self._settings.block_size)
        return names

    def num_cached_now(self, names: list[PrefixHash]) -> int:
        """Return how many leading tokens the prefix cache holds. From any thread."""
        return self._pool.find_prefix(names, self._firsts) * self._settings.block_size

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
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self._release(sequence)
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
        self._give_back(sequence)
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
        sampled = [rows[row][0] for row in samples]
        outputs = np.fromiter((sequence.num_output_tokens for sequence in sampled), np.int64, len(samples))
        rules = tuple(
            (place, sequence.rules.row(sequence.num_output_tokens))
            for place, sequence in enumerate(sampled)
            if sequence.rules is not None
        )
        return StepPlan(
            token_ids=token_ids,
            positions=positions,
            row_starts=row_starts,
            block_tables=self._tables.block_tables(slots, max(len(sequence.blocks[0]) for sequence, _ in rows)),
            sample_rows=np.array(samples, np.int32),
            sampling=self._tables.sampling(slots[samples], outputs, rules),
            scored=self._scored_tokens(row_starts),
        )

    def _scored_tokens(self, row_starts: Int32) -> ScoredTokens | None:
        """Return the prompt tokens of the plan whose log probability is wanted, and remember whose they are."""
        self._scored = []
        tokens: list[int] = []
        targets: list[int] = []
        for row, (sequence, num_scheduled) in enumerate(self._planned.items()):
            if not sequence.num_unscored_tokens:
                continue
            first = sequence.num_computed_tokens
            # The state of a token scores the one behind it; what an earlier admission has scored is kept.
            start = max(first, len(sequence.prompt_logprobs))
            end = min(first + num_scheduled, sequence.num_prompt_tokens - 1)
            for place in range(start, end):
                tokens.append(int(row_starts[row]) + place - first)
                targets.append(int(sequence.tokens[place + 1]))
                self._scored.append(sequence)
        if not tokens:
            return None
        return ScoredTokens(
            tokens=np.array(tokens, np.int32),
            targets=np.array(targets, np.int32),
            num_top=np.array([sequence.request.sampling.num_prompt_logprobs for sequence in self._scored], np.int32),
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
            held = [block for sequence in self._running for block in sequence.blocks[group] if block != NO_BLOCK]
            held += self.reservations.held(group)
            counts = np.bincount(np.array(held, np.intp), minlength=self._pool.num_blocks[group])
            counts += self._pool.pins(group)
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
            for group, blocks in enumerate(sequence.blocks):
                first = self._firsts.at_token(group, sequence.num_computed_tokens)
                assert len(blocks) >= enough, f"group {group}: KV without a block"
                assert NO_BLOCK not in blocks[first:], f"group {group}: a token that is seen has no block"
                assert sequence.first_blocks[group] == first, f"group {group}: a block that nobody sees is held"
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING
            assert sequence.slot is None
            assert not any(sequence.blocks), "a waiting sequence holds blocks"
        self._tables.validate(num_taken=len(self._running) + len(self.reservations))


def _arrival_no(sequence: Sequence) -> int:
    return sequence.arrival_no
