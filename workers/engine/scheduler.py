"""The scheduler: which tokens the next step computes.

There is no prefill phase and no decode phase, only tokens still to compute. Each step fills a token budget: sequences
with one token left first (they decode), then prefill chunks and new admissions in the order of the strategy.
Pure: no I/O, no torch, no clock but the injected one.

Blocks are bound as a sequence grows; what the prefix cache holds of it is taken over at admission, and the blocks that
a window has left are released. When none is free the youngest running sequence is put back and recomputed later.
No deadlock: a request whose worst case exceeds the pool is refused on arrival, so the oldest running sequence can
always finish once the younger ones are put back, and reservations end without its help (they join, and are then the
youngest, or fail by their own deadlines).
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.engine_config import VictimKind
from pdserve.cluster.base.errors import InvalidRequestError, OverloadedError
from pdserve.cluster.base.ids import AttemptKey, RequestId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import PrefixHash, PrefixIdentity, extend_chain
from pdserve.cluster.base.request import FinishReason, Request, TokenDelta, TokenLogprobs
from pdserve.workers.engine.admission import Admission
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists, BlockPool
from pdserve.workers.engine.holdings import CopyBlock, Holdings, SecondLevel
from pdserve.workers.engine.logit_rules import LogitRules, has_rules
from pdserve.workers.engine.plan import NO_TOKEN, StepOutput, StepPlan
from pdserve.workers.engine.plan_builder import build_plan
from pdserve.workers.engine.prefix_cache import FirstBlocks
from pdserve.workers.engine.request_check import MAX_INT32, are_tokens, check_numbers
from pdserve.workers.engine.reservation import Reservation, Reservations
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import Sequence, SequenceState, blocks_for, worst_case_tokens
from pdserve.workers.engine.step_model import StepShape
from pdserve.workers.engine.strategies import FirstCome, Strategy
from pdserve.workers.engine.wait_queue import WaitQueue, arrival_no

MOST_PASSED = 8
"""Requests that do not fit and may be passed in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits of the scheduler."""

    block_size: int
    max_running: int
    max_batch_tokens: int
    max_waiting: int
    max_model_len: int
    vocab_size: int = MAX_INT32
    eos_token_ids: tuple[int, ...] = ()
    has_prefix_cache: bool = True
    max_waiting_tokens: int = 1 << 30
    skip_age_s: float = 1.0
    """A request that does not fit may be passed by others for this long."""
    victim: VictimKind = VictimKind.LATEST


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrefill:
    """What the present plan computes of a prefill-only sequence; `blocks` are its tables, one list per group."""

    request_id: RequestId
    first_token: int
    end_token: int
    blocks: BlockLists


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """Token slots of blocks that are in use, and those of them that hold no token anybody sees."""

    num_held: int
    num_wasted: int


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
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        layout: KVLayout,
        identity: PrefixIdentity,
        clock: Clock,
        strategy: Strategy | None = None,
        *,
        copy_block: CopyBlock,
        host: SecondLevel | None = None,
        is_load_worth: Callable[[], bool] = lambda: True,
    ) -> None:
        """Without a `strategy`: in order of arrival. See Holdings for the others."""
        self._settings = settings
        self._strategy = strategy or FirstCome()
        self._pool = pool
        self._identity = identity
        self._firsts = FirstBlocks(layout)
        self._clock = clock
        # A request that joins with its KV arrives when it joins.
        self._waiting = WaitQueue(settings.skip_age_s)
        # In the order of the strategy: the last ones are put back first.
        self._running: list[Sequence] = []
        self._sequences: dict[AttemptKey, Sequence] = {}
        self._planned: dict[Sequence, int] = {}
        self._scored: list[Sequence] = []
        self._tables = RowTables(
            num_rows=settings.max_running,
            num_groups=pool.num_groups,
            num_blocks=blocks_for(settings.max_model_len, settings.block_size),
        )
        self._holdings = Holdings(
            pool,
            self._tables,
            self._firsts,
            block_size=settings.block_size,
            step_tokens=settings.max_batch_tokens,
            has_prefix_cache=settings.has_prefix_cache,
            copy_block=copy_block,
            host=host,
            is_load_worth=is_load_worth,
        )
        self._admission = Admission(pool, self._tables, self._holdings, self._running)
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
    def max_running(self) -> int:
        """Sequences that run at once at most."""
        return self._settings.max_running

    @property
    def max_batch_tokens(self) -> int:
        """Token budget of a step."""
        return self._settings.max_batch_tokens

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each KV group; 0 sees everything."""
        return tuple(self._firsts.window(group) for group in range(self._pool.num_groups))

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
        check_numbers(request, self._settings.vocab_size)
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

    def has_tokens(self, token_ids: tuple[int, ...]) -> bool:
        """True if the model has these tokens. From any thread."""
        return are_tokens(token_ids, self._settings.vocab_size)

    def add(self, request: Request, *, is_prefill_only: bool = False) -> None:
        """Queue a request. Raises InvalidRequestError if it can never run, OverloadedError if the queue is full."""
        self.check(request, is_prefill_only=is_prefill_only)
        self._refuse_copy(request)
        # Requests that the next step can admit do not count as waiting.
        num_queued = len(self._waiting) + len(self._running) - self._settings.max_running
        if num_queued >= self._settings.max_waiting:
            raise OverloadedError(f"{num_queued} requests are waiting, the most allowed")
        num_tokens = len(request.prompt_token_ids) + len(request.resume_token_ids)
        if self._waiting and self._waiting.num_tokens + num_tokens > self._settings.max_waiting_tokens:
            raise OverloadedError(f"requests of {self._waiting.num_tokens} tokens wait; no room for {num_tokens} more")
        self._waiting.add(self._arrive(request, is_prefill_only=is_prefill_only))

    def join(self, request: Request, reservation: Reservation, num_computed_tokens: int) -> None:
        """Take a request in whose first `num_computed_tokens` have their KV in the reservation's blocks.

        The reservation ends here. Raises InvalidRequestError if the request is here already; then it does not.
        """
        sequence = self._arrive(request, is_prefill_only=False)
        assert num_computed_tokens < sequence.num_tokens, "the last token is always computed here"
        assert not (num_computed_tokens and sequence.num_unscored_tokens), "a skipped token is never scored"
        self.reservations.joined(reservation)
        assert reservation.is_bound, "its blocks are only promised"
        sequence.slot = reservation.row
        sequence.blocks = reservation.blocks
        sequence.num_computed_tokens = num_computed_tokens
        self.num_queued_prompt_tokens -= num_computed_tokens
        sequence.num_cached_tokens = self._count_hit(
            sequence, reservation.num_cached_blocks * self._settings.block_size
        )
        for group, blocks in enumerate(sequence.blocks):
            self._tables.extend(group, reservation.row, 0, blocks)
        self._holdings.publish_arrived(sequence)
        self._run(sequence)
        if request.resume_token_ids:
            # Its first token was sampled where its prompt was computed.
            self._fork(sequence)

    def _fork(self, sequence: Sequence) -> None:
        """Begin the further samples of a sequence whose prompt is computed; nothing happens if they have begun.

        They share its blocks if there is a place for them now. Others wait, and find the prompt in the prefix cache.
        """
        forks, sequence.forks = sequence.forks, []
        for request in forks:
            child = self._arrive(request, is_prefill_only=False)
            row = self._tables.take_row()
            if row is not None:
                child.slot = row
                if self._holdings.share(sequence, child):
                    self.num_queued_prompt_tokens -= child.num_computed_tokens
                    self._strategy.admitted(child, 0)
                    self._run(child)
                    continue
                child.slot = None
                self._tables.return_row(row)
            self._waiting.add(child)

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
        self._strategy.arrived(sequence)
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

    def schedule(self, budget: int | None = None) -> StepPlan | None:
        """Return the next step's plan of at most `budget` tokens, or None if nothing can be computed.

        The budget is max_batch_tokens unless given.
        """
        assert not self._planned, "the last plan was not finished by update"
        left = self._settings.max_batch_tokens if budget is None else budget
        num_preemptions = self.num_preemptions
        block_size = self._settings.block_size
        for sequence in [item for item in self._running if item.num_tokens - item.num_computed_tokens == 1]:
            if left <= 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # put back for the sake of another in this very loop
            if sequence.num_computed_tokens < len(sequence.blocks[0]) * block_size:
                # The common case of a decode: its token has a block.
                self._planned[sequence] = 1
                left -= 1
            else:
                left += self._plan_running(sequence, left)
        self._plan_prompts(left, num_preemptions)
        if not self._planned:
            return None
        plan, self._scored = build_plan(self._planned, self._tables)
        return plan

    def _plan_prompts(self, budget: int, num_preemptions: int) -> None:
        """Plan prefills that run and requests that wait, in the order of the strategy, as far as the budget goes.

        Nobody comes in during a step in which others were put back for blocks: there have been more preemptions than
        `num_preemptions` then.
        """
        candidates = [item for item in self._running if item.num_remaining_tokens > 1]
        if self._waiting and (self._tables.has_free_row or self._strategy.displaces):
            candidates = sorted([*candidates, *self._waiting], key=arrival_no)
        num_passed = 0
        is_closed = False
        self._admission.forget()
        for sequence in self._strategy.order(candidates):
            if budget <= 0:
                return
            if sequence.state is SequenceState.RUNNING:
                budget += self._plan_running(sequence, budget)
            elif not is_closed and self.num_preemptions == num_preemptions:
                change = self._admit(sequence, budget)
                budget += change
                num_preemptions = self.num_preemptions
                if sequence.state is SequenceState.WAITING:
                    num_passed += 1
                    is_closed = not self._may_pass(sequence) or num_passed > MOST_PASSED

    def _may_pass(self, sequence: Sequence) -> bool:
        """True if others may be admitted before a sequence that does not fit."""
        can_others = self._strategy.allows_skips and self._tables.has_free_row
        return can_others and self._waiting.note_blocked(sequence, self._clock.now())

    def decoding_shape(self) -> StepShape:
        """Return the shape of a step with the running decodes alone."""
        decoding = [item for item in self._running if item.num_remaining_tokens == 1]
        return StepShape(
            num_tokens=len(decoding),
            num_rows=len(decoding),
            num_context_tokens=sum(item.num_tokens for item in decoding),
        )

    def update(self, output: StepOutput) -> list[TokenDelta]:
        """Take what the last plan produced, in its order; return what is new, endings included."""
        deltas = []
        tokens = iter(output.token_ids.tolist())
        logprobs = iter(output.logprobs)
        for sequence, score in zip(self._scored, output.scores, strict=True):
            sequence.prompt_logprobs.append(score)
        planned, self._planned = self._planned, {}
        for sequence, num_scheduled in planned.items():
            num_prompt_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
            if num_prompt_left > 0:
                self.num_prefilled_tokens += min(num_scheduled, num_prompt_left)
            sequence.num_computed_tokens += num_scheduled
            self.num_queued_prompt_tokens -= num_scheduled
            self._holdings.advance(sequence)
            if sequence.num_computed_tokens == sequence.num_tokens:
                deltas.append(self._take(sequence, next(tokens), next(logprobs, None)))
        return deltas

    def _take(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenDelta:
        if token_id == NO_TOKEN:
            return self._fail(sequence)
        request = sequence.request
        index = sequence.num_output_tokens
        sequence.append(token_id)
        self.num_queued_prompt_tokens += 1
        self.num_sampled_tokens += 1
        self._strategy.generated(sequence)
        if sequence.forks:
            self._fork(sequence)
        reason = self._finish_reason(sequence, token_id)
        if reason is not None or sequence.is_prefill_only:
            self._finish(sequence)
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            token_ids=(token_id,),
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens if index == sequence.num_resume_tokens else 0,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if index == 0 else (),
        )

    def _fail(self, sequence: Sequence) -> TokenDelta:
        """End a sequence whose logits are not finite: any token would be made up."""
        index = sequence.num_output_tokens
        if sequence.forks:
            self._fork(sequence)
        self._finish(sequence)
        return TokenDelta(
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            index=index,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error="the model's output for this request is not finite",
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._settings.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if sequence.num_tokens - sequence.num_prompt_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _plan_running(self, sequence: Sequence, budget: int) -> int:
        """Plan a running sequence's next tokens, putting others back for blocks; return the budget's change."""
        num_scheduled = sequence.next_chunk(budget)
        returned = 0
        self._admission.forget()
        while not self._holdings.bind(sequence, num_scheduled):
            victim = self._victim_of(sequence)
            if victim is None:
                # Nothing behind it is left: wait for those before it to finish.
                return returned
            returned += self._preempt(victim)
        self._planned[sequence] = num_scheduled
        return returned - num_scheduled

    def _victim_of(self, sequence: Sequence) -> Sequence | None:
        """Return whom to put back for a running sequence: one behind it in the running batch."""
        place = self._running.index(sequence)
        behind = self._running[place + 1 :]
        if not behind:
            return None
        if self._settings.victim is VictimKind.LATEST:
            return behind[-1]
        return max(behind, key=lambda item: (sum(self._holdings.num_won([item])), self._strategy.rank(item)))

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Run a waiting sequence if it fits; return the change of the budget, 0 if it does not fit now."""
        num_scheduled = self._try_admit(sequence, budget)
        if num_scheduled or not self._strategy.displaces:
            return -num_scheduled
        returned = self._displace_for(sequence)
        return 0 if returned is None else returned - self._try_admit(sequence, budget + returned)

    def _try_admit(self, sequence: Sequence, budget: int) -> int:
        """Run a waiting sequence if it fits; return the tokens planned, 0 if it does not fit now."""
        num_scheduled = self._admission.take(sequence, budget)
        if not num_scheduled:
            return 0
        num_hit_tokens = sequence.num_computed_tokens
        self.num_queued_prompt_tokens -= num_hit_tokens
        if sequence.admitted_time is None:
            sequence.num_cached_tokens = self._count_hit(sequence, num_hit_tokens)
        else:
            self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_hit_tokens)
        self._waiting.remove(sequence)
        self._run(sequence)
        self._planned[sequence] = num_scheduled
        return num_scheduled

    def _displace_for(self, sequence: Sequence) -> int | None:
        """Put back the fewest whom a sequence outranks; return the budget won, None if it would not do."""
        lower = [item for item in self._running if self._strategy.outranks(sequence, item)]
        if not lower or not self._admission.fits_without(sequence, lower):
            return None
        returned = self._preempt(lower.pop())
        while lower and not (self._tables.has_free_row and self._admission.fits_without(sequence, ())):
            returned += self._preempt(lower.pop())
        return returned

    def _count_hit(self, sequence: Sequence, num_hit_tokens: int) -> int:
        """Count a first admission; return the prompt tokens that were cached."""
        num_cached = min(num_hit_tokens, sequence.num_prompt_tokens)
        self._strategy.admitted(sequence, sequence.num_prompt_tokens - num_cached)
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

    def _run(self, sequence: Sequence) -> None:
        """Take a sequence that has its slot and blocks into the running batch."""
        assert sequence.slot is not None
        self._tables.fill_row(sequence.slot, sequence.request)
        sequence.state = SequenceState.RUNNING
        if sequence.admitted_time is None:
            sequence.admitted_time = self._clock.now()
            self._queue_times.append(sequence.admitted_time - sequence.arrival_time)
        insort(self._running, sequence, key=self._strategy.rank)

    def _preempt(self, sequence: Sequence) -> int:
        """Put a running sequence back; return the budget that its planned tokens had taken."""
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self._release(sequence)
        self._waiting.add(sequence)
        self.num_preemptions += 1
        return self._planned.pop(sequence, 0)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._release(sequence)
        sequence.state = SequenceState.FINISHED
        self.num_queued_prompt_tokens -= sequence.num_remaining_tokens
        self._strategy.ended(sequence)
        del self._sequences[sequence.request.request_id, sequence.request.attempt]

    def _release(self, sequence: Sequence) -> None:
        """Return everything that admission and planning took."""
        assert sequence.slot is not None
        self._running.remove(sequence)
        self.num_queued_prompt_tokens += sequence.num_computed_tokens
        self._holdings.give_back(sequence)
        self._tables.return_row(sequence.slot)
        sequence.slot = None
        self._admission.forget()

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

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the running sequences have; from any thread, an estimate while a step runs."""
        return sum(item.num_tokens for item in list(self._running))

    def slot_use(self, group: int) -> SlotUse:
        """Return what running sequences hold in a group and what of it is waste; a shared block counts for each.

        From any thread: an estimate while a step runs.
        """
        running = list(self._running)
        return SlotUse(
            num_held=max(0, sum(self._holdings.num_held(group, item) for item in running)) * self._settings.block_size,
            num_wasted=sum(self._holdings.num_wasted_slots(group, item) for item in running),
        )

    def validate(self) -> None:
        """Check every invariant; for tests, after each step."""
        self._pool.validate()
        for group in range(self._pool.num_groups):
            held = [block for sequence in self._running for block in sequence.blocks[group] if block != NO_BLOCK]
            held += self.reservations.held(group)
            counts = np.bincount(np.array(held, np.intp), minlength=self._pool.num_blocks[group])
            counts += self._pool.pins(group)
            assert (counts == self._pool.references(group)).all(), f"group {group}: references do not add up"
        places = [self._strategy.rank(sequence) for sequence in self._running]
        assert places == sorted(places), "the order of the running batch is lost"
        self._waiting.validate()
        assert len(self._running) + len(self._waiting) == len(self._sequences), "a sequence is lost"
        queued = sum(sequence.num_remaining_tokens for sequence in self._sequences.values())
        assert queued == self.num_queued_prompt_tokens, (
            f"{queued} tokens queued, counted {self.num_queued_prompt_tokens}"
        )
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.slot is not None
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens <= len(sequence.tokens)
            self._holdings.validate(sequence)
        self._tables.validate(num_taken=len(self._running) + len(self.reservations))
