"""What rank 0 copies the other ranks copy too, before anybody else can have the blocks. Ranks are threads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.engine import Engine
from pdserve.workers.kv.store import KVStore
from support.engines import make_engine, make_request, prompts_of, run
from support.gangs import Gang, running_gang

NUM_REQUESTS = 40


def rob(engine: Engine, stores: list[KVStore]) -> None:
    """Take every block that can be had, as transfers do, overwrite it on every rank at once, and give it back."""
    pool = engine.pool
    taken = pool.allocate([pool.num_available(group) for group in range(pool.num_groups)])
    assert taken is not None
    for store in stores:
        for group, blocks in enumerate(taken):
            for layer in store.layout.groups[group].layers:
                store.layer(layer)[blocks] = torch.randn(()).item()
    for group, blocks in enumerate(taken):
        pool.release(group, blocks)


def make_requests() -> list[Request]:
    """Requests that go on from each other's prompts, some in several samples."""
    prefixes = prompts_of([48, 70], seed=1)
    tails = prompts_of(np.random.default_rng(2).integers(1, 30, NUM_REQUESTS).tolist(), seed=3)
    return [
        make_request(
            str(number),
            prefixes[number % 2] + tail,
            max_tokens=12,
            temperature=0.8,
            seed=number,
            forks=number % 3 == 0,
        )
        for number, tail in enumerate(tails)
    ]


def stores_of(gang: Gang) -> list[KVStore]:
    return [gang.assembled.store, *(other.store for other in gang.others)]


def test_blocks_that_ranks_are_still_to_copy_belong_to_nobody_else(shared_checkpoints: Callable[[str], Path]) -> None:
    folder = shared_checkpoints("gemma3")
    requests = make_requests()
    with running_gang(folder, 2) as gang:
        expected = run(gang.assembled.engine, requests)
    rng = np.random.default_rng(4)
    outputs: dict[str, list[int]] = {name: [] for name in expected}
    ended: set[str] = set()
    aborted: set[str] = set()
    waiting = list(requests)
    with running_gang(folder, 2, host_memory_gib=0.01, max_running=6) as gang:
        engine = gang.assembled.engine
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.5:
                engine.scheduler.add(waiting.pop(0))
            if rng.random() < 0.05:
                name = str(rng.integers(NUM_REQUESTS))
                engine.scheduler.abort(RequestId(name), 0)
                aborted |= {name, f"{name}.1"}
            rob(engine, stores_of(gang))
            for delta in engine.step():
                outputs[delta.request_id].extend(delta.token_ids)
                if delta.finish_reason is not None:
                    ended.add(delta.request_id)
            rob(engine, stores_of(gang))
            engine.scheduler.validate()
        assert engine.pool.is_all_free
        host = engine.host
        assert host is not None
        assert host.num_loaded_blocks > 50, "the host tier was not used"
    whole = ended - aborted
    assert len(whole) > NUM_REQUESTS // 2
    for name in whole:
        assert outputs[name] == expected[name], name


def test_an_idle_worker_lets_its_ranks_copy(shared_checkpoints: Callable[[str], Path]) -> None:
    # The last token of the first text fills a block; nothing follows that could bring its copy to the other ranks.
    folder = shared_checkpoints("llama")
    prompt, more = prompts_of([31, 3], seed=5)
    settings = {"kv_memory_gib": 0.004, "max_batch_tokens": 128}
    with running_gang(folder, 2, host_memory_gib=0.004, **settings) as gang:
        engine = gang.assembled.engine
        text = run(engine, [make_request("a", prompt, max_tokens=2)])["a"]
        assert engine.pool.is_all_free, "a copy that is not made holds its block for ever"
        rob(engine, stores_of(gang))
        found = run(engine, [make_request("b", prompt + text + more, max_tokens=12)])
        assert engine.host is not None
        assert engine.host.num_loaded_blocks == 2
    assert found == run(make_engine(folder).engine, [make_request("b", prompt + text + more, max_tokens=12)])
