"""The host tier: what the pool gave up comes back by copies, if that is worth it; bounded."""

from pdserve.cluster.base.clock import ManualClock
from pdserve.workers.engine.step_model import StepShape
from pdserve.workers.kv.host_tier import HostTier
from pdserve.workers.model.digest import DigestModel, DigestRunner
from support.engines import make_digest_engine, make_request, prompts_of, run

MODEL = DigestModel(windows=(0, 24))


def test_a_preempted_request_goes_on_from_copies() -> None:
    # known_faults B037, with and without the tier
    requests = [
        make_request(str(n), prompts_of([34], seed=n)[0], max_tokens=35, temperature=1.0, seed=5) for n in range(2)
    ]
    expected = {request.request_id: MODEL.generate(request) for request in requests}
    swapped, recomputed = (
        make_digest_engine(MODEL, num_blocks=7, host_blocks=64),
        make_digest_engine(MODEL, num_blocks=7),
    )
    for engine in (swapped, recomputed):
        assert run(engine, requests) == expected
        assert engine.scheduler.num_preemptions > 0
    assert swapped.host is not None
    assert swapped.host.num_loaded_blocks > 0
    # Only what no whole block held is computed again.
    assert swapped.scheduler.num_recomputed_tokens <= 16 * swapped.scheduler.num_preemptions
    assert swapped.scheduler.num_recomputed_tokens < recomputed.scheduler.num_recomputed_tokens


def test_an_evicted_prefix_comes_back_from_the_second_level() -> None:
    prompt = prompts_of([100])[0]
    engine = make_digest_engine(MODEL, num_blocks=12, host_blocks=64)
    first = make_request("first", prompt, max_tokens=2)
    assert run(engine, [first])["first"] == MODEL.generate(first)
    run(engine, [make_request("flood", prompts_of([180], seed=9)[0], max_tokens=2)])
    assert engine.scheduler.num_cached_now(engine.scheduler.prefix_names(first)) == 0
    again = make_request("again", prompt, max_tokens=9, temperature=1.0, seed=3)
    assert run(engine, [again])["again"] == MODEL.generate(again)
    assert engine.scheduler.num_cached_prompt_tokens == 96
    assert engine.host is not None
    # Six blocks of the full group; of the window those that the next token sees.
    assert engine.host.num_loaded_blocks == 6 + 2


def test_copies_are_not_taken_where_computing_is_quicker() -> None:
    prompt = prompts_of([100])[0]
    engine = make_digest_engine(MODEL, num_blocks=12, host_blocks=64)
    run(engine, [make_request("first", prompt, max_tokens=2)])
    run(engine, [make_request("flood", prompts_of([180], seed=9)[0], max_tokens=2)])
    assert engine.host is not None
    engine.host.block_s = 1.0
    for _ in range(50):
        engine.times.observe(StepShape(num_tokens=100, num_rows=1, num_context_tokens=100), 0.001)
    again = make_request("again", prompt, max_tokens=2)
    assert run(engine, [again])["again"] == MODEL.generate(again)
    assert (engine.host.num_loaded_blocks, engine.scheduler.num_cached_prompt_tokens) == (0, 0)


def test_the_least_recent_copy_goes_first() -> None:
    runner = DigestRunner(MODEL, num_blocks=(8, 8), block_size=16)
    tier = HostTier(runner.store, [2, 1], ManualClock())
    names = [bytes([number]) * 16 for number in range(3)]
    for number, name in enumerate(names[:2]):
        for layer in range(2):
            runner.store.layer(layer)[number] = float(number + 1)
        tier.save(0, number, name)
    tier.save(0, 0, names[0])  # used again
    tier.save(0, 2, names[2])
    assert [tier.holds(0, name) for name in names] == [True, False, True]
    tier.load(0, [names[0]], [7])
    assert float(runner.store.layer(1)[7].mean()) == 1.0
    tier.save(1, 0, names[0])
    tier.save(1, 1, names[1])
    assert [tier.holds(1, name) for name in names] == [False, True, False]
    empty = HostTier(runner.store, [0, 0], ManualClock())
    empty.save(0, 0, names[0])
    assert not empty.holds(0, names[0])
