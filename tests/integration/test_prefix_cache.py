"""The prefix cache over real channels and transports: what is held is not sent, what is cached is not computed."""

from dataclasses import replace

import pytest

from pdserve.cluster.base.config import TransportKind
from pdserve.cluster.base.request import Request
from pdserve.router.replay import Replayer
from support.engines import make_digest_engine, make_request, prompts_of, run
from support.pairs import LAYER_BYTES, assert_clean, received_bytes, running_pair, transfer_config
from support.services import MODEL, eventually, running_controller, running_replayer, running_worker

PROMPT = prompts_of([100], seed=4)[0]


async def ask(replayer: Replayer, request: Request) -> tuple[list[int], int]:
    """Return a request's tokens, and how many of its prompt were cached."""
    tokens: list[int] = []
    num_cached = 0
    async with replayer.open(request) as running:
        async for delta in running:
            num_cached = delta.num_cached_tokens if delta.index == 0 else num_cached
            tokens += delta.token_ids
    return tokens, num_cached


@pytest.mark.parametrize("transport", list(TransportKind))
@pytest.mark.parametrize("num_held", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("num_known", [0, 3, 6])
async def test_only_what_the_sink_lacks_is_sent_and_only_what_the_source_lacks_is_computed(
    transport: TransportKind, num_held: int, num_known: int
) -> None:
    # known_faults B072: the sink holds some blocks, the source some of its own; then a prompt that differs in block 2
    prefill = make_digest_engine(MODEL, max_batch_tokens=40)
    decode = make_digest_engine(MODEL, max_batch_tokens=16)
    for engine, count in ((prefill, num_known), (decode, num_held)):
        if count:
            run(engine, [make_request("seed", PROMPT[: count * 16 + 1], max_tokens=1)])
    computed_before = prefill.scheduler.num_prefilled_tokens
    request = make_request("r", PROMPT, max_tokens=8, temperature=1.0, seed=3)
    other = make_request("other", [*PROMPT[:20], *PROMPT[21:]], max_tokens=8, temperature=1.0, seed=4)
    async with running_pair(transfer_config(transport), prefill=prefill, decode=decode) as pair:
        tokens, num_cached = await ask(pair.replayer, request)
        assert tokens == MODEL.generate(request)
        if num_held == 6:
            # Four tokens are left: the decode worker computes them itself.
            assert (received_bytes(pair.decode), num_cached) == (0, 96)
            assert prefill.scheduler.num_prefilled_tokens == computed_before
        else:
            full, windowed = 100 - 16 * num_held, 100 - max(16 * num_held, 100 - 24)
            assert received_bytes(pair.decode) == (full + windowed) * LAYER_BYTES
            assert prefill.scheduler.num_prefilled_tokens - computed_before == 100 - 16 * num_known
            assert num_cached == 16 * num_known
        assert (await ask(pair.replayer, other))[0] == MODEL.generate(other)
        await assert_clean(pair.prefill, pair.decode)


async def test_cached_tokens_are_equal_colocated_and_disaggregated() -> None:
    salted = replace(make_request("salted", PROMPT, max_tokens=3), cache_salt="tenant")
    first = make_request("first", PROMPT[:50], max_tokens=20, temperature=1.0, seed=1)
    answer = MODEL.generate(first)
    requests = [
        first,
        make_request("again", PROMPT[:50], max_tokens=4),
        make_request("next turn", [*PROMPT[:50], *answer, 10, 11, 12], max_tokens=4),
        make_request("longer", PROMPT, max_tokens=4),
        make_request("short", [10, 11], max_tokens=4),
        salted,
        replace(salted, request_id=make_request("salted again", [0]).request_id),
    ]
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, name="mixed-0"),
    ):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        colocated = [await ask(replayer, request) for request in requests]
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        apart = [await ask(pair.replayer, request) for request in requests]
        await assert_clean(pair.prefill, pair.decode)
    assert apart == colocated
    assert [tokens for tokens, _ in apart] == [MODEL.generate(request) for request in requests]
    assert [num_cached for _, num_cached in apart] == [0, 48, 64, 48, 0, 0, 96]


async def test_what_an_aborted_transfer_brought_is_never_served() -> None:
    # I14: blocks of a transfer that did not end well are not published.
    decode = make_digest_engine(MODEL, max_batch_tokens=16)
    prefill = make_digest_engine(MODEL, max_batch_tokens=16)
    async with running_pair(transfer_config(TransportKind.SHM), prefill=prefill, decode=decode) as pair:
        for number in range(12):
            request = make_request(f"left {number}", PROMPT, max_tokens=50, seed=number, temperature=1.0)
            async with pair.replayer.open(request) as running:
                async for _ in running:
                    break  # the first token is here; the client leaves before, while or after the rest is sent
        await assert_clean(pair.prefill, pair.decode)
        names = decode.scheduler.prefix_names(make_request("whole", PROMPT))
        whole = make_request("whole", PROMPT, max_tokens=30)
        answer = MODEL.generate(whole)
        assert (await ask(pair.replayer, whole))[0] == answer
        # The window's first block came in part, so it serves nobody; what decode has completed since does.
        assert decode.scheduler.num_cached_now(names) == 0
        following = make_request("following", [*PROMPT, *answer, 10], max_tokens=5)
        assert decode.scheduler.num_cached_now(decode.scheduler.prefix_names(following)) == 128
        assert await ask(pair.replayer, following) == (MODEL.generate(following), 128)
        await assert_clean(pair.prefill, pair.decode)
