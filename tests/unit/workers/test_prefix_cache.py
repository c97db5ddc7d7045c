"""The prefix cache: in the pool, and through the scheduler over the digest model."""

import random

import pytest

from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.cluster.base.request import Request
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists, BlockPool
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.prefix_cache import FirstBlocks
from pdserve.workers.model.digest import DigestModel
from support.engines import make_digest_engine, make_request, prompts_of, run

FULL = DigestModel(windows=(0,))
MODEL = DigestModel(windows=(0, 24))
CHAIN = [bytes([number]) * 16 for number in range(8)]


def firsts_of(*windows: int) -> FirstBlocks:
    layout: KVLayout = DigestModel(windows=windows).layout(16)
    return FirstBlocks(layout)


def fill(pool: BlockPool, chain: list[PrefixHash]) -> BlockLists:
    """Take blocks and publish them as the chain; they stay referenced."""
    blocks = pool.allocate([len(chain)] * pool.num_groups)
    assert blocks is not None
    for group, held in enumerate(blocks):
        for block, name in zip(held, chain, strict=True):
            pool.publish(group, block, name)
    return blocks


def give_back(pool: BlockPool, blocks: BlockLists) -> None:
    for group, held in enumerate(blocks):
        pool.release(group, held)
    pool.validate()


def test_a_released_prefix_is_found_again_with_its_blocks() -> None:
    pool, firsts = BlockPool([6]), firsts_of(0)
    blocks = fill(pool, CHAIN[:3])
    give_back(pool, blocks)
    assert (pool.num_free(0), pool.num_cached(0), pool.is_all_free) == (6, 3, True)
    assert pool.find_prefix(CHAIN, firsts) == 3
    assert pool.acquire_prefix(CHAIN, firsts) == blocks
    assert pool.acquire_prefix(CHAIN[:2], firsts) == [blocks[0][:2]]
    assert (pool.num_free(0), pool.references(0).max()) == (3, 2)
    assert pool.acquire_prefix([b"?" * 16, *CHAIN[1:]], firsts) == [[]]
    give_back(pool, [blocks[0][:2]])
    give_back(pool, blocks)
    assert pool.is_all_free


def test_the_end_of_the_least_recent_prefix_goes_first() -> None:
    pool, firsts = BlockPool([6]), firsts_of(0)
    give_back(pool, fill(pool, CHAIN[:3]))
    other = [b"x" * 16, b"y" * 16, b"z" * 16]
    give_back(pool, fill(pool, other))
    give_back(pool, pool.acquire_prefix(CHAIN[:3], firsts))  # used: now the more recent one
    taken = pool.allocate([2])
    assert taken is not None
    assert (pool.find_prefix(other, firsts), pool.find_prefix(CHAIN, firsts)) == (1, 3)
    more = pool.allocate([2])
    assert more is not None
    assert (pool.find_prefix(other, firsts), pool.find_prefix(CHAIN, firsts)) == (0, 2)
    pool.validate()


def test_promised_blocks_are_not_taken_by_a_hit() -> None:
    pool, firsts = BlockPool([4], promised_share=1.0), firsts_of(0)
    give_back(pool, fill(pool, CHAIN[:3]))
    assert pool.promise([2])
    assert pool.acquire_prefix(CHAIN[:3], firsts) == [[]]
    assert len(pool.acquire_prefix(CHAIN[:2], firsts)[0]) == 2
    pool.validate()
    assert len(pool.redeem([2])[0]) == 2
    pool.validate()


def test_a_group_with_a_window_needs_only_what_the_next_token_sees() -> None:
    # window 24: after 3 blocks (48 tokens) the query at 48 sees 25 … 48, so blocks 1 and 2
    pool, firsts = BlockPool([6, 6]), firsts_of(0, 24)
    blocks = fill(pool, CHAIN[:3])
    give_back(pool, blocks)
    held = pool.allocate([0, 4])  # evicts one idle block of the window group: the last
    assert held is not None
    assert pool.acquire_prefix(CHAIN, firsts) == [blocks[0][:2], blocks[1][:2]]
    pool, blocks = BlockPool([6, 6]), []
    blocks = fill(pool, CHAIN[:3])
    give_back(pool, blocks)
    assert pool.acquire_prefix(CHAIN, firsts) == [blocks[0], [NO_BLOCK, *blocks[1][1:]]]


def test_a_second_block_of_a_name_stays_unknown_and_is_blank_when_free() -> None:
    pool = BlockPool([4])
    first, second = fill(pool, CHAIN[:1]), fill(pool, CHAIN[:1])
    give_back(pool, second)
    assert (pool.num_free(0), pool.num_cached(0)) == (3, 0)
    give_back(pool, first)
    assert pool.num_cached(0) == 1


def test_events_replayed_give_what_is_held() -> None:
    pool, rng = BlockPool([6, 6]), random.Random(3)
    firsts = firsts_of(0, 24)
    known: set[tuple[int, PrefixHash]] = set()
    next_no = 0
    chains = [[bytes([seed, number]) * 8 for number in range(4)] for seed in range(5)]
    for turn in range(200):
        chain = rng.choice(chains)[: rng.randint(1, 4)]
        hit = pool.acquire_prefix(chain, firsts)
        missing = len(chain) - len(hit[0])
        new = pool.allocate([missing, missing])
        assert new is not None
        for group, (held, added) in enumerate(zip(hit, new, strict=True)):
            for block, name in zip(added, chain[len(hit[0]) :], strict=True):
                pool.publish(group, block, name)
            pool.release(group, held)
            pool.release(group, added)
        if turn % 7 == 0:
            found = pool.events_since(next_no)
            assert not found.is_snapshot
            assert [event.sequence_no for event in found.events] == list(range(next_no, found.next_no))
            for event in found.events:
                (known.add if event.is_stored else known.discard)((event.group, event.name))
            next_no = found.next_no
    for event in pool.events_since(next_no).events:
        (known.add if event.is_stored else known.discard)((event.group, event.name))
    snapshot = pool.events_since(10**9)
    assert snapshot.is_snapshot
    assert {(event.group, event.name) for event in snapshot.events} == known
    assert known


def outputs_of(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
    """Run requests one after the other; return texts and cached tokens."""
    texts, cached = [], []
    for request in requests:
        before = engine.scheduler.num_cached_prompt_tokens
        texts.append(run(engine, [request])[request.request_id])
        cached.append(engine.scheduler.num_cached_prompt_tokens - before)
    return texts, cached


@pytest.mark.parametrize("model", [FULL, MODEL])
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_prompt_length_hits_whole_blocks_and_computes_its_last_token(model: DigestModel, block_size: int) -> None:
    # known_faults B029, B031, B034
    text = prompts_of([200])[0]
    for length in (block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1, 87):
        engine = make_digest_engine(model, block_size=block_size)
        requests = [make_request(str(turn), text[:length], max_tokens=3) for turn in range(3)]
        requests.append(make_request("longer", text[: length + block_size], max_tokens=3))
        texts, cached = outputs_of(engine, requests)
        assert texts == [model.generate(request) for request in requests]
        whole = (length - 1) // block_size * block_size
        assert cached == [0, whole, whole, length // block_size * block_size]
        assert engine.pool.is_all_free


@pytest.mark.parametrize("budget", [128, 209, 210, 465])
def test_the_budget_counts_only_what_is_computed(budget: int) -> None:
    # known_faults B033
    text = prompts_of([256 + 209])[0]
    engine = make_digest_engine(MODEL, num_blocks=128, max_batch_tokens=budget)
    run(engine, [make_request("prefix", text[:256], max_tokens=1)])
    before = engine.scheduler.num_prefilled_tokens
    pair = [make_request(str(number), text, max_tokens=4, seed=number, temperature=1.0) for number in range(2)]
    assert run(engine, pair) == {request.request_id: MODEL.generate(request) for request in pair}
    computed = engine.scheduler.num_prefilled_tokens - before
    # The second may find what the first has computed when it is admitted.
    assert 209 < computed <= 2 * 209


def test_what_decode_computed_serves_the_next_turn() -> None:
    engine = make_digest_engine(MODEL)
    first = make_request("0", prompts_of([30])[0], max_tokens=40)
    (answer,), _ = outputs_of(engine, [first])
    following = make_request("1", [*first.prompt_token_ids, *answer, 10, 11, 12], max_tokens=5)
    (text,), cached = outputs_of(engine, [following])
    assert text == MODEL.generate(following)
    # 70 tokens are known, and the KV of the last one was never computed: four blocks.
    assert cached == [64]


def test_salts_keep_requests_apart() -> None:
    # known_faults B128, with the pair that must hit
    engine = make_digest_engine(MODEL)
    prompt = prompts_of([160])[0]
    requests = [
        Request(
            request_id=request.request_id,
            attempt=0,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=salt,
        )
        for number, salt in enumerate(("x", "y", "x", ""))
        for request in [make_request(str(number), prompt, max_tokens=2)]
    ]
    assert outputs_of(engine, requests)[1] == [0, 0, 144, 0]


def test_a_late_joiner_with_a_hit_changes_nobody() -> None:
    # known_faults B050
    long = make_request("a", prompts_of([64])[0], max_tokens=40, temperature=1.0, seed=1)
    cold = make_request("b", prompts_of([50], seed=9)[0], max_tokens=20)
    hit = make_request("c", [*long.prompt_token_ids, 10, 11], max_tokens=20, temperature=1.0, seed=2)
    engine = make_digest_engine(MODEL)
    outputs: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    arrivals = {0: long, 3: cold, 4: hit}
    step = 0
    while engine.has_work or step < 5:
        if step in arrivals:
            engine.scheduler.add(arrivals[step])
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            assert delta.num_cached_tokens == (64 if delta.request_id == "c" and delta.index == 0 else 0)
        engine.scheduler.validate()
        step += 1
    assert outputs == {name: MODEL.generate(request) for name, request in (("a", long), ("b", cold), ("c", hit))}


def test_a_preempted_request_that_finds_its_own_blocks_is_no_hit() -> None:
    # known_faults B108
    engine = make_digest_engine(MODEL, num_blocks=8)
    requests = [make_request(str(number), prompts_of([30], seed=number)[0], max_tokens=70) for number in range(4)]
    assert run(engine, requests) == {request.request_id: MODEL.generate(request) for request in requests}
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_recomputed_tokens > 0
    assert (engine.scheduler.num_admitted_prompt_tokens, engine.scheduler.num_cached_prompt_tokens) == (120, 0)


def test_a_hit_counts_once_however_often_its_admission_is_tried() -> None:
    # known_faults B109
    engine = make_digest_engine(FULL, num_blocks=6, max_running=4)
    text = prompts_of([48])[0]
    run(engine, [make_request("seed", text[:33], max_tokens=1)])  # two blocks cached
    blocker = make_request("blocker", prompts_of([40], seed=5)[0], max_tokens=24)
    engine.scheduler.add(blocker)
    engine.step()
    engine.scheduler.add(make_request("hit", text, max_tokens=2))
    while engine.has_work:
        engine.step()
        engine.scheduler.validate()
    assert engine.scheduler.num_admitted_prompt_tokens == 33 + 40 + 48
    assert engine.scheduler.num_cached_prompt_tokens in (0, 16, 32)


def test_aborts_in_the_queue_and_at_any_time_leave_nothing() -> None:
    # known_faults B044, B045
    engine = make_digest_engine(MODEL, max_running=1, num_blocks=16)
    prompt = prompts_of([60])[0]
    run(engine, [make_request("seed", prompt, max_tokens=1)])
    for number in range(20):
        engine.scheduler.add(make_request(str(number), [*prompt, 10 + number], max_tokens=5))
    engine.step()
    for number in range(0, 20, 2):
        assert engine.scheduler.abort(make_request(str(number), [0]).request_id, 0)
        engine.scheduler.validate()
    while engine.has_work:
        engine.step()
        engine.scheduler.validate()
    assert engine.pool.is_all_free
    assert not engine.pool.references(0).any()


def test_a_window_group_holds_little_more_than_its_window() -> None:
    engine = make_digest_engine(DigestModel(windows=(0, 64)), num_blocks=80, max_batch_tokens=32)
    engine.scheduler.add(make_request("0", prompts_of([900])[0], max_tokens=100))
    most = 0
    while engine.has_work:
        engine.step()
        engine.scheduler.validate()
        most = max(most, 80 - engine.pool.num_free(1))
    # window 64 and a step of 32 tokens: six blocks, and one that both touch
    assert most <= 7
    assert engine.pool.is_all_free


def test_the_cache_can_be_turned_off() -> None:
    engine = make_digest_engine(MODEL, has_prefix_cache=False)
    requests = [make_request(str(turn), prompts_of([100])[0], max_tokens=2) for turn in range(2)]
    assert outputs_of(engine, requests)[1] == [0, 0]
    assert engine.pool.num_cached(0) == 0
