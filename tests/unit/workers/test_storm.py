"""Random schedules over scheduler, pool, prefix cache, host tier and transfers, on the digest model.

A machine of Hypothesis draws arrivals, forks, prefills for others, transfers that arrive whole, in part or not at all,
aborts and steps, over tiny pools. Every invariant is checked after each rule, every text at the end.
"""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.engine_config import VictimKind
from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.cluster.base.request import Request, forks_of
from pdserve.workers.engine.block_pool import NO_BLOCK
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.engine.strategies import Fair, FirstCome, Priority, ShortestPrefill
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.model.digest import DigestModel, DigestRunner
from support.engines import make_request, prompts_of

NUM_SCHEDULES = 2000
TEXTS = [prompts_of([200], seed=seed)[0] for seed in range(2)]
WINDOWS: list[tuple[int, ...]] = [(0,), (0, 20), (24,), (0, 8, 40)]
MODELS = [DigestModel(windows=windows, layers_per_group=1, num_heads=1) for windows in WINDOWS]
REQUESTS: dict[str, Any] = {
    "text": st.integers(0, 1),
    "length": st.sampled_from((1, 16, 17, 40, 48, 49, 64, 90, 100, 120)),
    "max_tokens": st.sampled_from((1, 2, 3, 9, 20)),
    "temperature": st.sampled_from((0.0, 1.0)),
    "priority": st.integers(0, 2),
    "tenant": st.sampled_from("ab"),
}


class Storm(RuleBasedStateMachine):
    """One worker, in every role at once."""

    @initialize(
        model=st.sampled_from(MODELS),
        block_size=st.sampled_from((16, 32)),
        num_blocks=st.integers(5, 14),
        strategy=st.sampled_from((FirstCome, Priority, lambda: ShortestPrefill(20.0), lambda: Fair({"a": 2.0}))),
        host_blocks=st.sampled_from((0, 3, 40)),
        limits=st.fixed_dictionaries(
            {
                "max_running": st.integers(1, 5),
                "max_batch_tokens": st.sampled_from((3, 20, 60, 200)),
                "has_prefix_cache": st.sampled_from((True, True, True, False)),
                "skip_age_s": st.sampled_from((0.0, 1.0)),
                "victim": st.sampled_from(list(VictimKind)),
            }
        ),
    )
    def begin(
        self,
        model: DigestModel,
        block_size: int,
        num_blocks: int,
        strategy: Any,
        host_blocks: int,
        limits: dict[str, Any],
    ) -> None:
        """Make the worker."""
        self.model, self.block_size, self.capacity = model, block_size, num_blocks * block_size
        counts = [num_blocks] * len(model.windows)
        self.runner = DigestRunner(model, num_blocks=counts, block_size=block_size)
        self.clock = ManualClock()
        self.engine = Engine(
            SchedulerSettings(block_size=block_size, max_waiting=99, max_model_len=self.capacity, **limits),
            self.runner,
            layout=self.runner.store.layout,
            num_blocks=counts,
            clock=self.clock,
            promised_share=0.5,
            strategy=strategy(),
            host=HostTier(self.runner.store, [host_blocks] * len(counts), ManualClock()) if host_blocks else None,
        )
        self.scheduler = self.engine.scheduler
        self.count = 0
        self.samples: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prefills: set[str] = set()
        self.aborted: set[str] = set()
        self.transfers: list[tuple[Request, Reservation]] = []

    def draw_request(
        self, text: int, length: int, max_tokens: int, temperature: float, **fields: Any
    ) -> Request | None:
        self.count += 1
        length = min(length, self.capacity - max_tokens - 1)
        if length < 1:
            return None
        return make_request(
            str(self.count),
            TEXTS[text][:length],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=self.count,
            **fields,
        )

    def expect(self, request: Request) -> None:
        for sample in (request, *forks_of(request)):
            self.samples[sample.request_id] = sample
            self.outputs[sample.request_id] = list(sample.resume_token_ids)

    @rule(forks=st.integers(0, 2), **REQUESTS)
    def arrive(self, forks: int, **fields: Any) -> None:
        """A client's request."""
        request = self.draw_request(forks=forks, **fields)
        if request is None:
            return
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            return  # a window pool that cannot hold it
        self.expect(request)

    @rule(**REQUESTS)
    def prefill(self, **fields: Any) -> None:
        """A prompt computed for another worker."""
        request = self.draw_request(**fields)
        if request is None:
            return
        try:
            self.scheduler.add(request, is_prefill_only=True)
        except InvalidRequestError:
            return
        self.expect(request)
        self.prefills.add(request.request_id)

    @rule(forks=st.integers(0, 2), **REQUESTS)
    def reserve(self, forks: int, **fields: Any) -> None:
        """A request whose KV shall come from another worker."""
        request = self.draw_request(forks=forks, **fields)
        if request is None or request.sampling.max_tokens < 2:
            return
        names = self.scheduler.prefix_names(request)
        reservation = self.scheduler.reservations.reserve(len(request.prompt_token_ids), names)
        if reservation is not None:
            self.transfers.append((request, reservation))

    @precondition(lambda self: self.transfers)
    @rule(place=st.integers(0, 99), outcome=st.sampled_from(("whole", "part", "none", "left")))
    def end_transfer(self, place: int, outcome: str) -> None:
        """Its KV has come, or part of it, or it failed before, or the client has left."""
        request, reservation = self.transfers.pop(place % len(self.transfers))
        reservations, num_tokens = self.scheduler.reservations, len(request.prompt_token_ids)
        num_cached = reservation.num_cached_blocks * self.block_size
        if outcome == "left":
            reservations.release(reservation)
            return
        if outcome == "none":
            reservations.trim(reservation, num_cached)
            self.join(request, reservation, num_cached)
            return
        reservations.bind(reservation)
        self.scatter(request, reservation, num_cached)
        if outcome == "part":
            # The first token was lost: the last one of the prompt is computed again.
            self.join(request, reservation, num_tokens - 1)
            return
        first = self.model.generate(request)[0]
        resumed = make_request(
            request.request_id,
            request.prompt_token_ids,
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
            resume=(first,),
            priority=request.priority,
            tenant=request.tenant,
            forks=len(request.forks),
        )
        self.join(resumed, reservation, num_tokens)

    def join(self, request: Request, reservation: Reservation, num_computed: int) -> None:
        self.scheduler.join(request, reservation, num_computed)
        self.expect(request)

    def scatter(self, request: Request, reservation: Reservation, num_cached: int) -> None:
        """Write what a source sends: in groups with a window what the last token sees."""
        tokens = np.array(request.prompt_token_ids, np.int32)
        for group, spec in enumerate(self.runner.store.layout.groups):
            first = max(num_cached, spec.first_needed(len(tokens) - 1))
            places = np.arange(first, len(tokens), dtype=np.int32)
            values = self.model.kv(group, tokens[first:], places)
            blocks = np.array(reservation.blocks[group], np.int32)[places // self.block_size]
            assert NO_BLOCK not in blocks
            for index, layer in enumerate(spec.layers):
                view = self.runner.store.layer(layer).numpy()
                view[blocks, :, :, places % self.block_size] = values[:, index]

    @precondition(lambda self: self.samples)
    @rule(place=st.integers(0, 99))
    def abort(self, place: int) -> None:
        """A client leaves."""
        name = list(self.samples)[place % len(self.samples)]
        if self.scheduler.abort(self.samples[name].request_id, 0):
            self.aborted.add(name)

    @rule(count=st.sampled_from((1, 3, 15)))
    def step(self, count: int) -> None:
        """The engine goes on."""
        for _ in range(count):
            for delta in self.engine.step():
                assert delta.request_id not in self.aborted, "a token of an aborted request"
                assert delta.index == len(self.outputs[delta.request_id]), "a token is missing or repeated"
                self.outputs[delta.request_id] += delta.token_ids
            self.clock.advance(0.3)
            self.scheduler.validate()

    def check_invariants(self, settings: Any = None, *args: Any, **kwargs: Any) -> None:
        """After each rule."""
        super().check_invariants(settings, *args, **kwargs)
        if hasattr(self, "scheduler"):
            self.scheduler.validate()

    def teardown(self) -> None:
        """Everyone who was not aborted has the definition's text, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        while self.transfers:
            self.end_transfer(0, "left")
        steps = 0
        while self.scheduler.has_work:
            self.step(1)
            steps += 1
            assert steps < 3000, "no end: a deadlock"
        for name, sample in self.samples.items():
            first = name.partition(".")[0]
            if name in self.aborted or (sample.sample and first in self.aborted and not self.outputs[name]):
                continue
            expected = self.model.generate(sample)
            assert self.outputs[name] == (expected[:1] if name in self.prefills else expected), name
        assert self.engine.pool.is_all_free
        assert len(self.scheduler.reservations) == 0


def test_every_schedule_keeps_every_promise() -> None:
    run_state_machine_as_test(
        Storm,
        settings=settings(
            max_examples=NUM_SCHEDULES,
            stateful_step_count=16,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
