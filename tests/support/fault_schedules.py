"""One fault schedule: a small cluster of real workers in virtual time, requests, faults, and what must hold after it.

Everything is drawn from the seed: engines, pools, ranks, block sizes, dtypes, faults of the transports, aborts, cut
channels, frozen, killed and restarted workers. Only threads, sockets and time are replaced.
"""

import asyncio
import contextvars
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.errors import NoWorkerError, OverloadedError, WorkerLostError
from pdserve.cluster.base.kv_layout import KVDtype
from pdserve.cluster.base.request import Request
from pdserve.router.replay import Replayer
from pdserve.workers.engine.engine import Engine
from pdserve.workers.model.digest import DigestModel
from pdserve.workers.worker import Worker
from support.engines import make_digest_engine, make_request
from support.faulty_transport import Fault, Faults, FaultySender, FaultyTransports
from support.services import CHANNEL, generate, running_controller, running_replayer, running_worker
from support.threadless import Turns, use_loop_turns
from support.virtual_time import OWNER, VirtualLoop, run_virtual

WINDOWS = ((0,), (0, 24), (24,))
SETTLE_S = 60.0
ANSWER_S = 200.0
PEACE_S = 4.0
"""Longer than a frozen worker takes to leave the view, and a new one to be linked."""


class LoopClock:
    """The time of the running loop."""

    def now(self) -> float:
        """See Clock."""
        return asyncio.get_running_loop().time()


@dataclass
class Outcome:
    """What a schedule did."""

    num_finished: int = 0
    num_errors: int = 0
    num_aborted: int = 0
    num_deaths: int = 0
    num_failovers: int = 0
    num_committed: int = 0
    virtual_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)


class Schedule:
    """One seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed = seed
        self.outcome = Outcome()
        self._rng = random.Random(seed)
        self._loop = VirtualLoop(random.Random(seed + 1))
        Turns.rng = random.Random(seed + 2)
        Turns.slowness = self._rng.choice((1.0, 1.0, 10.0, 50.0))
        self._model = DigestModel(windows=self._rng.choice(WINDOWS), num_heads=2)
        self._faults = Faults(random.Random(seed + 3))
        self._senders: dict[str, FaultySender] = {}
        self._workers: dict[str, tuple[Worker, Engine]] = {}
        self._owners: dict[str, str] = {}
        use_loop_turns(monkeypatch)
        # Fewer messages that say nothing.
        monkeypatch.setattr("support.services.CHANNEL", replace(CHANNEL, heartbeat_s=1.2, silence_s=2.5))
        monkeypatch.setattr("pdserve.workers.controller_link.REPORT_INTERVAL_S", 1.0)
        monkeypatch.setattr(
            "pdserve.workers.handoff.ranks.Transports",
            lambda config, token, is_receiving: FaultyTransports(
                config, self._faults, self._loop.network, self._senders
            ),
        )

    def run(self) -> Outcome:
        """Run it; an AssertionError says what did not hold."""
        run_virtual(self._main(), self._loop)
        self.outcome.virtual_s = self._loop.time()
        self.outcome.faults = dict(self._faults.counts)
        return self.outcome

    async def _main(self) -> None:
        rng = self._rng
        async with AsyncExitStack() as stack:
            self._controller = await stack.enter_async_context(running_controller())
            replayer = await stack.enter_async_context(
                running_replayer(self._controller, max_attempts=4, clock=LoopClock(), replay_timeout_s=30.0)
            )
            counts = {"prefill": rng.randint(1, 2), "decode": rng.randint(1, 2)}
            names = [f"{role}-{number}" for role, count in counts.items() for number in range(count)]
            for name in names:
                await self._start(name, stack)
            if rng.random() < 0.8:
                await asyncio.sleep(0.5)  # else requests come before the links
            self._faults.shares = self._draw_faults()
            publishing = asyncio.create_task(self._publish())
            clients = [asyncio.create_task(self._client(replayer, number)) for number in range(rng.randint(2, 8))]
            trouble = asyncio.create_task(self._trouble(names, stack))
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*clients, trouble)
            self._faults.stop()
            for name in names:
                if name not in self._workers:
                    await self._start(name, stack)
            await asyncio.sleep(PEACE_S)
            await self._check_idle()
            probe = make_request("probe", [11] * 40, max_tokens=3)
            assert (await generate(replayer, probe))[0] == self._model.generate(probe)
            await self._check_idle()
            assert self._faults.num_reads_after_free == 0, "a slot was read after its link was fenced (I2)"
            self._count()
            publishing.cancel()

    async def _publish(self) -> None:
        """The view follows the workers, as the real controller's does."""
        while True:
            await asyncio.sleep(0.5)
            self._controller.publish()

    def _draw_faults(self) -> dict[Fault, float]:
        rng = self._rng
        chosen = rng.sample(list(Fault), rng.randint(0, 4))
        if rng.random() < 0.1:
            self._faults.refused = frozenset({TransportKind.SHM})
        return {fault: rng.choice((0.01, 0.05, 0.3)) for fault in chosen}

    def _make_engine(self, name: str) -> Engine:
        rng, plain = self._rng, self._model
        model = DigestModel(
            windows=plain.windows,
            num_heads=plain.num_heads,
            tp_size=rng.choice((1, 1, 2, 4)),
            kv_dtype=rng.choice((KVDtype.FLOAT32, KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.INT8)),
        )
        block_size = rng.choice((16, 16, 32))
        return make_digest_engine(
            model,
            block_size=block_size,
            num_blocks=rng.choice((12, 16, 30, 60)) * 16 // block_size,
            max_running=rng.choice((2, 4, 16)),
            max_batch_tokens=rng.choice((16, 64, 200)),
            has_prefix_cache=rng.random() < 0.8,
        )

    async def _start(self, name: str, stack: AsyncExitStack) -> None:
        transfer = TransferConfig(
            transports=(TransportKind.SHM, TransportKind.TCP)[: self._rng.choice((1, 2, 2))],
            slot_bytes=64 << 10,
            max_slots_per_link=self._rng.choice((2, 4)),
            promised_share=self._rng.choice((0.25, 1.0)),
            test_interval_s=self._rng.choice((1.0, 60.0, 60.0, 60.0)),
        )
        engine = self._make_engine(name)
        worker = running_worker(
            self._controller,
            engine,
            name,
            transfer=transfer,
            clock=LoopClock(),
            distance_s=self._rng.choice((None, 0.002, 0.05)),
        )
        entered = await self._as_owner(name, stack.enter_async_context(worker))
        self._workers[name] = entered, engine

    async def _as_owner(self, name: str, work: Coroutine[Any, Any, Worker]) -> Worker:
        self._owners[name] = f"{name}, life {len(self._owners)}.{self.outcome.num_deaths}"
        context = contextvars.copy_context()
        context.run(OWNER.set, self._owners[name])
        return await asyncio.create_task(work, context=context)

    async def _client(self, replayer: Replayer, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        request = self._draw_request(rng, number)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        task = asyncio.create_task(generate(replayer, request))
        if rng.random() < 0.3:
            await asyncio.wait([task], timeout=rng.choice((0.02, 0.3, 3.0)) * rng.random())
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)
                self.outcome.num_aborted += 1
                return
        try:
            tokens, reason = await task
        except (WorkerLostError, NoWorkerError, OverloadedError):
            self.outcome.num_errors += 1
            return
        assert reason is not None, "a stream without an ending"
        if reason.value == "error":
            self.outcome.num_errors += 1
            return
        assert tokens == self._model.generate(request), f"{request.request_id} has another text"
        self.outcome.num_finished += 1

    def _draw_request(self, rng: random.Random, number: int) -> Request:
        length = rng.choice((1, 15, 16, 17, 31, 32, 33, 48, rng.randint(1, 150)))
        # Some share a prefix.
        shared = [20 + place % 7 for place in range(length)]
        prompt = shared if rng.random() < 0.4 else [rng.randrange(10, 500) for _ in range(length)]
        return make_request(
            f"r{number}",
            prompt,
            max_tokens=rng.choice((1, 2, 5, 12, 30)),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
        )

    async def _trouble(self, names: list[str], stack: AsyncExitStack) -> None:
        """Cut, freeze, kill and restart, at random points."""
        rng, network = self._rng, self._loop.network
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            await asyncio.sleep(rng.uniform(0.0, 0.8))
            name = rng.choice(names)
            if name not in self._workers:
                continue
            kind = rng.choice(("cut", "cut", "kill", "freeze", "engine"))
            if kind == "cut":
                network.cut(self._owners[name], rng.choice(["test", *self._owners.values()]))
                continue
            self.outcome.num_deaths += 1
            worker, engine = self._workers.pop(name)
            if kind == "engine":
                engine.step = _explode  # type: ignore[method-assign]
                worker.submit(make_request("bomb", [10], max_tokens=1))
                await asyncio.sleep(0.5)
            (network.freeze if kind == "freeze" else network.kill)(self._owners[name])
            if rng.random() < 0.7:
                await asyncio.sleep(rng.uniform(0.0, 3.0))
                await self._start(name, stack)

    async def _check_idle(self) -> None:
        """LEAK check of every worker that lives (I16)."""
        deadline = self._loop.time() + SETTLE_S
        while (trouble := self._leaks()) and self._loop.time() < deadline:  # noqa: ASYNC110 — conditions, no events
            await asyncio.sleep(0.25)
        assert not trouble, trouble
        for worker, engine in self._workers.values():
            engine.scheduler.validate()
            assert worker.num_live == 0

    def _leaks(self) -> list[str]:
        found = []
        for name, (worker, engine) in self._workers.items():
            load = worker.load()
            if worker.num_live or load.num_running or load.num_waiting or load.num_queued_prompt_tokens:
                found.append(f"{name} holds requests: {load}")
            if not engine.pool.is_all_free or len(engine.scheduler.reservations):
                found.append(f"{name} holds blocks: {load}")
            if not worker.has_idle_handoff:
                found.append(f"{name} holds transfers: {load}")
        return found

    def _count(self) -> None:
        for worker, _ in self._workers.values():
            metrics = worker._transfer_metrics
            self.outcome.num_failovers += int(metrics.failovers._value.get())
            self.outcome.num_committed += int(metrics.received.labels("committed")._value.get())


def _explode() -> None:
    raise RuntimeError("the model exploded")
