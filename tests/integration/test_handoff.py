"""Prefill and decode apart, on the digest model, over real channels and real transports, in one event loop."""

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.cluster.base.errors import ProtocolError, TokenTimeoutError, WorkerLostError
from pdserve.cluster.base.ids import Incarnation, RequestId
from pdserve.cluster.base.request import FinishReason
from pdserve.cluster.base.transfer_messages import Commit, Credit, Prefill, TransferAbort, TransferId
from pdserve.kvtransfer.slots import LandingSlots
from pdserve.kvtransfer.transports.tcp import TcpReceiver
from pdserve.workers.kv.copy import BlockCopier
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.digest import DigestModel
from support.engines import make_digest_engine, make_request, prompts_of
from support.pairs import LAYER_BYTES, assert_clean, has_link, received_bytes, running_pair, transfer_config
from support.runners import BlindRunner, DamagingCopier, GatedCopier, SlowCopier, make_gated_engine
from support.services import CHANNEL, MODEL, eventually, generate, running_controller, running_replayer, running_worker

NARROW = DigestModel(windows=(0,), layers_per_group=2)
"""Without a window, so that everything held is usable."""
TRANSPORTS = list(TransportKind)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_texts_equal_those_of_one_engine(transport: TransportKind) -> None:
    lengths: Sequence[int] = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200, 300)
    requests = [
        make_request(str(n), prompt, max_tokens=1 + n % 9, temperature=n % 2, seed=n)
        for n, prompt in enumerate(prompts_of(lengths))
    ]
    decode = make_digest_engine(MODEL, num_blocks=128)
    async with running_pair(transfer_config(transport), decode=decode) as pair:
        results = await asyncio.gather(*(generate(pair.replayer, request) for request in requests))
        for request, (tokens, reason) in zip(requests, results, strict=True):
            assert tokens == MODEL.generate(request), request.request_id
            assert reason is FinishReason.LENGTH
        assert pair.prefill.load().num_prefilled_tokens == sum(lengths)
        assert pair.decode.load().num_prefilled_tokens == 0
        await assert_clean(pair.prefill, pair.decode)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_aborts_at_any_time_and_damaged_chunks_change_no_other_text(transport: TransportKind) -> None:
    # known_faults B051, B053, B055, B059; I1, I4, I5, I12, I16
    rng = random.Random(f"storm {transport}")
    copiers: list[DamagingCopier] = []

    def make_copier(store: KVStore) -> BlockCopier:
        copiers.append(DamagingCopier(store, share=0.05, seed=1))
        return copiers[-1]

    requests = [
        make_request(str(n), prompt, max_tokens=rng.randint(1, 12), temperature=n % 2, seed=n)
        for n, prompt in enumerate(prompts_of([rng.randint(1, 260) for _ in range(250)]))
    ]
    prefill = make_digest_engine(MODEL, num_blocks=60, max_batch_tokens=64)
    decode = make_digest_engine(MODEL, num_blocks=60)
    async with running_pair(
        transfer_config(transport, max_slots_per_link=3), prefill=prefill, decode=decode, make_copier=make_copier
    ) as pair:

        async def client(number: int) -> tuple[list[int], FinishReason | None] | None:
            await asyncio.sleep(number * 0.004)
            task = asyncio.create_task(generate(pair.replayer, requests[number]))
            if rng.random() < 0.6:
                await asyncio.wait([task], timeout=rng.random() ** 3 * 0.6)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                    return None
            return await task

        results = await asyncio.gather(*(client(number) for number in range(len(requests))))
        finished = [(request, result) for request, result in zip(requests, results, strict=True) if result is not None]
        assert 50 < len(finished) < 240
        for request, (tokens, reason) in finished:
            assert tokens == MODEL.generate(request), request.request_id
            assert reason is FinishReason.LENGTH
        assert sum(copier.num_damaged for copier in copiers) > 0
        await assert_clean(pair.prefill, pair.decode)
        probe = make_request("probe", [11] * 100, max_tokens=5)
        assert (await generate(pair.replayer, probe))[0] == MODEL.generate(probe)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_link_whose_chunks_never_verify_is_fenced_and_the_text_is_still_right(transport: TransportKind) -> None:
    # known_faults B059, B063
    damage = 1.0

    def make_copier(store: KVStore) -> BlockCopier:
        return DamagingCopier(store, share=damage)

    request = make_request("r", [10] * 90, max_tokens=6)
    async with running_pair(transfer_config(transport), make_copier=make_copier) as pair:
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        text = pair.decode.metrics_text()
        assert "pdserve_kv_checksum_failures_total 0.0" not in text
        assert 'pdserve_kv_local_prefills_total{cause="no prefill worker left"} 1.0' in text
        copier = pair.decode._settings.copiers[0]
        assert isinstance(copier, DamagingCopier)
        copier.share = 0.0
        await eventually(lambda: has_link(pair.decode), "the pair is used again")
        again = make_request("again", [11] * 90, max_tokens=6)
        assert (await generate(pair.replayer, again))[0] == MODEL.generate(again)
        assert pair.decode.load().num_prefilled_tokens == 90
        await assert_clean(pair.prefill, pair.decode)


async def test_a_prefill_worker_that_fails_in_mid_transfer_leaves_verified_blocks_to_the_next() -> None:
    # known_faults B061; I11, I13
    engine, runner = make_gated_engine(MODEL, max_batch_tokens=64)
    transfer = transfer_config(TransportKind.SHM)
    request = make_request("r", list(range(10, 210)), max_tokens=8)
    async with (
        running_pair(transfer, prefill=engine) as pair,
        running_worker(pair.controller, None, "prefill-1", transfer=transfer) as second,
    ):
        await eventually(lambda: sum(link.state == "open" for link in pair.decode.load().links) == 2, "both linked")
        runner.layer_gate.clear()
        task = asyncio.create_task(generate(pair.replayer, request))
        # Two steps of 64 tokens, four layers each, are let through and received.
        for count in range(1, 9):
            await eventually(lambda count=count: runner.num_layers_done >= count, f"layer {count}")
            if count == 8:
                await eventually(lambda: received_bytes(pair.decode) == 128 * LAYER_BYTES, "received")
                runner.fails_after_layers = True
            runner.layer_gate.set()
            runner.layer_gate.clear()
        runner.layer_gate.set()
        assert (await task)[0] == MODEL.generate(request)
        (timeline,) = pair.decode.traces("r")
        assert "asked prefill-1 over shm, 128 tokens held" in timeline
        # It computes all 200 tokens and ships only what is missing.
        assert second.load().num_prefilled_tokens == 200
        await assert_clean(pair.decode, second)


@pytest.mark.parametrize("length", [48, 64, 70])
async def test_a_prefill_worker_that_dies_with_the_whole_prompt_shipped_leaves_one_token_to_compute(
    length: int,
) -> None:
    # The last token's hidden state is lost with it, also if the prompt ends with a block.
    engine, runner = make_gated_engine(NARROW, max_batch_tokens=512)
    runner.fails_after_layers = True
    request = make_request("r", list(range(10, 10 + length)), max_tokens=8)
    decode = make_digest_engine(NARROW)
    async with running_pair(transfer_config(TransportKind.TCP), prefill=engine, decode=decode) as pair:
        runner.layer_gate.clear()
        task = asyncio.create_task(generate(pair.replayer, request))
        layout = NARROW.layout(16)
        expected = length * layout.num_layers * layout.token_bytes
        for count in range(1, layout.num_layers + 1):
            await eventually(lambda count=count: runner.num_layers_done >= count, f"layer {count}")
            if count == layout.num_layers:
                await eventually(lambda: received_bytes(pair.decode) == expected, "everything has come")
            runner.layer_gate.set()
            runner.layer_gate.clear()
        runner.layer_gate.set()
        assert (await task)[0] == NARROW.generate(request)
        assert f"computes the prompt here, {length - 1} tokens held" in pair.decode.traces("r")[0]
        assert pair.decode.load().num_prefilled_tokens == 1
        await assert_clean(pair.decode)


async def test_without_a_prefill_worker_left_the_decode_worker_computes_only_what_is_missing() -> None:
    engine, runner = make_gated_engine(NARROW, max_batch_tokens=64)
    request = make_request("r", list(range(10, 210)), max_tokens=8)
    decode = make_digest_engine(NARROW)
    async with running_pair(transfer_config(TransportKind.TCP), prefill=engine, decode=decode) as pair:
        runner.layer_gate.clear()
        task = asyncio.create_task(generate(pair.replayer, request))
        layout = NARROW.layout(16)
        for count in range(1, 2 * layout.num_layers + 1):
            await eventually(lambda count=count: runner.num_layers_done >= count, f"layer {count}")
            if count < 2 * layout.num_layers:
                runner.layer_gate.set()
                runner.layer_gate.clear()
        expected = 128 * layout.num_layers * layout.token_bytes
        await eventually(lambda: received_bytes(pair.decode) == expected, "two steps have come")
        await pair.prefill._server.stop()
        runner.layer_gate.set()
        assert (await task)[0] == NARROW.generate(request)
        assert pair.decode.load().num_prefilled_tokens == 72
        await assert_clean(pair.decode)


async def test_kv_that_a_damaged_resend_has_overwritten_is_not_used() -> None:
    # I12: two tries overlap; the second damages what the first had verified, and dies.
    first, first_runner = make_gated_engine(NARROW, max_batch_tokens=64)
    copiers: list[DamagingCopier] = []

    def make_copier(store: KVStore) -> BlockCopier:
        copiers.append(DamagingCopier(store, share=0.0))
        return copiers[-1]

    request = make_request("r", list(range(10, 110)), max_tokens=8)
    transfer = transfer_config(TransportKind.SHM)
    async with (
        running_pair(transfer, prefill=first, decode=make_digest_engine(NARROW), make_copier=make_copier) as pair,
        running_worker(pair.controller, make_digest_engine(NARROW), "prefill-1", transfer=transfer),
    ):
        await eventually(lambda: sum(link.state == "open" for link in pair.decode.load().links) == 2, "both linked")
        first_runner.layer_gate.clear()
        task = asyncio.create_task(generate(pair.replayer, request))
        layout = NARROW.layout(16)
        for count in range(1, layout.num_layers + 2):  # the second step has done one layer of two
            await eventually(lambda count=count: first_runner.num_layers_done >= count, f"layer {count}")
            if count <= layout.num_layers:
                first_runner.layer_gate.set()
                first_runner.layer_gate.clear()
        expected = (64 * layout.num_layers + 36) * layout.token_bytes
        await eventually(lambda: received_bytes(pair.decode) == expected, "one layer of the second step has come")
        copiers[0].share = 1.0
        await pair.prefill._server.stop()
        first_runner.layer_gate.set()
        assert (await task)[0] == NARROW.generate(request)
        assert copiers[0].num_damaged > 0
        assert "64 tokens held" in pair.decode.traces("r")[0]
        await assert_clean(pair.decode)


async def test_a_sink_that_stalls_costs_its_links_and_is_used_again_when_it_moves() -> None:
    copiers: list[GatedCopier] = []

    def make_copier(store: KVStore) -> BlockCopier:
        copiers.append(GatedCopier(store))
        return copiers[-1]

    transfer = transfer_config(TransportKind.SHM, stall_s=0.3, streaming_timeout_s=0.8)
    async with running_pair(transfer, make_copier=make_copier) as pair:
        copiers[0].gate.clear()
        request = make_request("r", [10] * 200, max_tokens=5)
        task = asyncio.create_task(generate(pair.replayer, request))
        await eventually(lambda: pair.prefill.load().num_sending == 1, "it is sent")
        await eventually(lambda: pair.prefill.load().num_sending == 0, "the stall ended it")
        await eventually(lambda: pair.prefill._engine.pool.is_all_free, "its blocks are free")
        assert not has_link(pair.decode)
        copiers[0].gate.set()
        assert (await task)[0] == MODEL.generate(request)
        await eventually(lambda: has_link(pair.decode), "linked again")
        again = make_request("again", [10] * 200, max_tokens=5)
        assert (await generate(pair.replayer, again))[0] == MODEL.generate(again)
        await assert_clean(pair.prefill, pair.decode)


async def test_a_frozen_prefill_worker_is_given_up_by_the_deadline_while_the_decode_engine_is_in_a_step() -> None:
    # I6, I7: the reaper needs neither peer nor scheduler.
    prefill, frozen = make_gated_engine(MODEL)
    decode, busy = make_gated_engine(MODEL)
    other = make_request("other", [10, 11], max_tokens=40)
    request = make_request("r", list(range(10, 110)), max_tokens=8)
    transfer = transfer_config(TransportKind.SHM, streaming_timeout_s=0.6, queued_timeout_s=0.6)
    async with running_pair(transfer, prefill=prefill, decode=decode) as pair:
        task = asyncio.create_task(generate(pair.replayer, other))
        await eventually(lambda: pair.decode.load().num_generated_tokens > 2, "another request decodes")
        busy.gate.clear()
        frozen.layer_gate.clear()
        frozen_task = asyncio.create_task(generate(pair.replayer, request))
        await eventually(lambda: bool(pair.decode.traces("r")), "it has come")
        await eventually(lambda: "failed: no progress for" in pair.decode.traces("r")[0], "given up")
        busy.gate.set()
        frozen.layer_gate.set()
        assert (await frozen_task)[0] == MODEL.generate(request)
        assert (await task)[0] == MODEL.generate(other)
        await assert_clean(pair.prefill, pair.decode)


async def test_a_queue_that_waits_behind_work_is_not_given_up() -> None:
    prefill, slow = make_gated_engine(MODEL, max_running=1, max_batch_tokens=16)
    transfer = transfer_config(TransportKind.SHM, queued_timeout_s=1.5)
    requests = [make_request(str(n), list(range(10, 110)), max_tokens=2) for n in range(3)]
    async with running_pair(transfer, prefill=prefill) as pair:
        slow.gate.clear()
        tasks = [asyncio.create_task(generate(pair.replayer, request)) for request in requests]
        for _ in range(8):  # one step each 0.3 s: each prompt takes longer than the limit
            await asyncio.sleep(0.3)
            slow.gate.set()
            await asyncio.sleep(0.002)
            slow.gate.clear()
        slow.gate.set()
        for request, (tokens, _) in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert tokens == MODEL.generate(request)
        assert "replays_total 0.0" in pair.decode.metrics_text()


async def test_a_pair_that_cannot_exchange_kv_is_refused_with_the_field_and_served_locally() -> None:
    # known_faults B069, B070, B071: another model of equal shapes, and the same one in other blocks, dtype and ranks
    other = make_digest_engine(DigestModel(vocab_size=511))
    odd = make_digest_engine(DigestModel(vocab_size=512, num_heads=3))
    transfer = transfer_config(TransportKind.SHM)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, other, "prefill-0", transfer=transfer) as first,
        running_worker(controller, odd, "prefill-1", transfer=transfer) as second,
        running_worker(controller, None, "decode-0", transfer=transfer) as decode,
    ):
        await eventually(
            lambda: (
                len(decode.load().links) == 2
                and all("refused: model_digest: 'digest-" in link.note for link in decode.load().links)
            ),
            f"refused: {decode.load().links}",
        )
        request = make_request("r", [10] * 50, max_tokens=5)
        assert (await generate(replayer, request))[0] == MODEL.generate(request)
        assert 'local_prefills_total{cause="no prefill worker"} 1.0' in decode.metrics_text()
        await assert_clean(first, second, decode)


async def test_a_transport_that_the_source_does_not_offer_makes_way_for_the_next() -> None:
    source = transfer_config(TransportKind.TCP)
    sink = TransferConfig(transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, None, "prefill-0", transfer=source) as prefill,
        running_worker(controller, None, "decode-0", transfer=sink) as decode,
    ):
        await eventually(lambda: has_link(decode) and replayer.dispatcher.has_worker, "linked")
        assert [link.transport for link in decode.load().links] == ["tcp"]
        assert "link_demotions_total 1.0" in decode.metrics_text()
        request = make_request("r", [10] * 50, max_tokens=5)
        assert (await generate(replayer, request))[0] == MODEL.generate(request)
        await assert_clean(prefill, decode)


async def test_a_restarted_prefill_worker_is_linked_again_under_its_new_life() -> None:
    # known_faults B062
    transfer = transfer_config(TransportKind.TCP)
    async with (
        running_controller() as controller,
        running_replayer(controller) as replayer,
        running_worker(controller, None, "decode-0", transfer=transfer) as decode,
    ):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        for life in range(3):
            async with running_worker(controller, None, "prefill-0", transfer=transfer) as prefill:
                await eventually(lambda: has_link(decode), "linked")
                request = make_request(f"life {life}", [10 + life] * 70, max_tokens=4)
                assert (await generate(replayer, request))[0] == MODEL.generate(request)
                assert prefill.load().num_prefilled_tokens == 70
                await assert_clean(prefill, decode)
            await eventually(lambda: not decode.load().links, "unlinked")


async def test_more_requests_than_the_decode_pool_holds_all_finish() -> None:
    # known_faults B065, B066, B073, B074
    requests = [
        make_request(str(n), prompt, max_tokens=120) for n, prompt in enumerate(prompts_of([33 + n for n in range(16)]))
    ]
    decode = make_digest_engine(MODEL, num_blocks=24)
    async with running_pair(transfer_config(TransportKind.SHM), decode=decode) as pair:
        results = await asyncio.gather(*(generate(pair.replayer, request) for request in requests))
        for request, (tokens, _) in zip(requests, results, strict=True):
            assert tokens == MODEL.generate(request)
        assert decode.scheduler.num_preemptions > 0
        await assert_clean(pair.prefill, pair.decode)


async def test_two_requests_that_each_need_most_of_the_pool_both_finish() -> None:
    # known_faults B039: each holds 18 of 40 blocks when its KV has come, and needs 25; a third is computed here.
    requests = [make_request(str(n), prompts_of([288], seed=n)[0], max_tokens=112) for n in range(2)]
    decode = make_digest_engine(MODEL, num_blocks=40)
    async with running_pair(transfer_config(TransportKind.SHM), decode=decode) as pair:
        first = [asyncio.create_task(generate(pair.replayer, request)) for request in requests]
        await eventually(lambda: pair.decode.load().num_generated_tokens > 0, "one decodes")
        await pair.prefill.stop()
        local = make_request("local", prompts_of([288], seed=2)[0], max_tokens=112)
        assert (await generate(pair.replayer, local))[0] == MODEL.generate(local)
        for request, task in zip(requests, first, strict=True):
            assert (await task)[0] == MODEL.generate(request)
        await assert_clean(pair.decode)


async def test_a_decode_worker_without_room_is_passed_by_for_one_that_has_it() -> None:
    full, held = make_gated_engine(MODEL, num_blocks=8)
    transfer = transfer_config(TransportKind.SHM)
    async with (
        running_pair(transfer, decode=full) as pair,
        running_worker(pair.controller, None, "decode-1", transfer=transfer) as other,
    ):
        await eventually(lambda: has_link(other) and len(pair.replayer.dispatcher._links) == 2, "both are linked")
        await eventually(lambda: all(link.is_open for link in pair.replayer.dispatcher._links.values()), "connected")
        held.gate.clear()
        first = make_request("first", [10] * 100, max_tokens=20)
        task = asyncio.create_task(generate(pair.replayer, first))
        await eventually(lambda: full.pool.num_free(0) < 2, "the first decode worker is full")
        second = make_request("second", [10] * 40, max_tokens=5)
        assert (await generate(pair.replayer, second))[0] == MODEL.generate(second)
        assert other.load().num_generated_tokens == 4
        held.gate.set()
        assert (await task)[0] == MODEL.generate(first)


async def test_a_request_waits_at_a_full_decode_worker_if_the_other_one_has_failed() -> None:
    full, held = make_gated_engine(MODEL, num_blocks=8)
    broken, breaking = make_gated_engine(MODEL)
    transfer = transfer_config(TransportKind.SHM)
    async with (
        running_pair(transfer, decode=full) as pair,
        running_worker(pair.controller, broken, "decode-1", transfer=transfer) as other,
    ):
        links = pair.replayer.dispatcher._links
        await eventually(lambda: has_link(other) and len(links) == 2, "both are linked")
        await eventually(lambda: all(link.is_open for link in links.values()), "connected")
        breaking.fails = True
        other.submit(make_request("kill", [10, 11], max_tokens=3))
        await eventually(lambda: other.registration()[2] is not None, "it has failed")
        held.gate.clear()
        first = make_request("first", [10] * 100, max_tokens=20)
        task = asyncio.create_task(generate(pair.replayer, first))
        await eventually(lambda: full.pool.num_free(0) < 2, "the first decode worker is full")
        second = make_request("second", [10] * 40, max_tokens=5)
        waiting = asyncio.create_task(generate(pair.replayer, second))
        await eventually(lambda: any("waits for room" in text for text in pair.decode.traces("second")), "it waits")
        held.gate.set()
        assert (await task)[0] == MODEL.generate(first)
        assert (await waiting)[0] == MODEL.generate(second)
        await assert_clean(pair.prefill, pair.decode)


async def test_a_worker_that_lives_and_gives_no_token_is_an_error_and_no_death() -> None:
    engine, runner = make_gated_engine(MODEL)
    async with (
        running_controller() as controller,
        running_replayer(controller, token_timeout_s=0.3) as replayer,
        running_worker(controller, engine) as worker,
    ):
        await eventually(lambda: replayer.dispatcher.has_worker, "connected")
        runner.gate.clear()
        with pytest.raises(TokenTimeoutError, match=r"no token within 0\.3 s"):
            await generate(replayer, make_request("r", [10, 11], max_tokens=5))
        runner.gate.set()
        await assert_clean(worker)


async def test_one_token_answers_ship_no_kv_and_stop_tokens_end_at_the_first() -> None:
    # known_faults B006, B074, B076
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        one = make_request("one", [10] * 70, max_tokens=1)
        assert await generate(pair.replayer, one) == (MODEL.generate(one), FinishReason.LENGTH)
        assert received_bytes(pair.decode) == 0
        plain = make_request("plain", [12] * 70, max_tokens=9)
        first = MODEL.generate(plain)[0]
        sampling = replace(plain.sampling, stop_token_ids=(first,))
        stopped = replace(plain, request_id=RequestId("stopped"), sampling=sampling)
        assert await generate(pair.replayer, stopped) == ([first], FinishReason.STOP)
        assert pair.decode.load().num_generated_tokens == 0
        await assert_clean(pair.prefill, pair.decode)


async def test_a_prompt_without_finite_logits_ends_once_with_an_error_wherever_it_is_computed() -> None:
    prefill = make_digest_engine(MODEL)
    prefill.runner = BlindRunner(MODEL, num_blocks=prefill.pool.num_blocks, block_size=16)
    async with running_pair(transfer_config(TransportKind.SHM), prefill=prefill) as pair:
        async with pair.replayer.open(make_request("bad", [500] * 40, max_tokens=5)) as stream:
            deltas = [delta async for delta in stream]
        assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((), FinishReason.ERROR)]
        assert deltas[0].error == "the model's output for this request is not finite"
        good = make_request("good", [10] * 40, max_tokens=5)
        assert (await generate(pair.replayer, good))[0] == MODEL.generate(good)
        await assert_clean(pair.prefill, pair.decode)


async def test_messages_of_another_life_are_counted_and_never_acted_on() -> None:
    # I3
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        (peer,) = pair.decode._sink._peers.all()  # type: ignore[union-attr]
        stale = TransferId(
            request_id=RequestId("x"),
            attempt=0,
            transfer_no=9,
            source=Incarnation("another"),
            sink=Incarnation("another"),
        )
        request = make_request("x", [10, 11], max_tokens=3)
        peer.post(Commit(transfer=stale))
        peer.post(TransferAbort(transfer=stale, reason="stale"))
        peer.post(Prefill(transfer=stale, request=request, num_tokens_held=0, needs_kv=False, deadline_s=9.0))
        await eventually(lambda: "stale_messages_total 3.0" in pair.prefill.metrics_text(), "counted at the source")
        await eventually(lambda: "stale_messages_total 1.0" in pair.decode.metrics_text(), "its REJECT at the sink")
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        await assert_clean(pair.prefill, pair.decode)


async def test_a_credit_that_was_never_earned_costs_the_sink_its_channel_and_nobody_else() -> None:
    # I2, I17
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        (peer,) = pair.decode._sink._peers.all()  # type: ignore[union-attr]
        (keeper,) = pair.decode._ranks.local.sinks[0].links_of(peer.pair_no).keepers  # type: ignore[union-attr]
        assert keeper.link is not None
        peer.post(Credit(link_no=keeper.link.link_no, stream_no=0, seq=77, slot=0))
        await eventually(lambda: not has_link(pair.decode), "disconnected")
        await eventually(lambda: has_link(pair.decode), "linked again")
        request = make_request("r", [10] * 40, max_tokens=3)
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        await assert_clean(pair.prefill, pair.decode)


async def test_data_connections_without_the_token_or_a_key_are_refused() -> None:
    # I17
    async with running_pair(transfer_config(TransportKind.TCP)) as pair:
        listener = pair.prefill._ranks.local.transports.listener
        for token, key in ((b"wrong", "x"), (CHANNEL.token, "nobody"), (CHANNEL.token, "k" * 999)):
            receiver = TcpReceiver(
                f"{listener.host}|{listener.port}|{key}",
                token,
                LandingSlots(link_no=1, stream_no=0, source=Incarnation("p"), num_slots=1, slot_bytes=64),
                lambda header: None,
                lambda reason: None,
            )
            try:
                await receiver.attach()
            except ProtocolError:
                continue
            await receiver.free()  # returns because the source closed the connection
        request = make_request("r", [10] * 40, max_tokens=3)
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)


async def test_links_and_their_memory_are_gone_after_the_workers() -> None:
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for transport in TRANSPORTS:
        async with running_pair(transfer_config(transport)) as pair:
            request = make_request("r", [10] * 200, max_tokens=3)
            assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
    new = set(threading.enumerate()) - threads
    assert [thread.name for thread in new if "asyncio" not in thread.name] == []
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)


async def test_a_dead_decode_workers_streams_go_on_elsewhere_without_a_gap_or_a_repetition() -> None:
    # known_faults B064
    transfer = transfer_config(TransportKind.SHM)
    requests = [
        make_request(str(n), prompt, max_tokens=60, temperature=n % 2, seed=n)
        for n, prompt in enumerate(prompts_of([20 + 7 * n for n in range(12)]))
    ]
    doomed, gated = make_gated_engine(MODEL, num_blocks=256)
    async with (
        running_pair(transfer, decode=doomed) as pair,
        running_worker(pair.controller, make_digest_engine(MODEL, num_blocks=256), "decode-1", transfer=transfer),
    ):
        tasks = [asyncio.create_task(generate(pair.replayer, request)) for request in requests]
        await eventually(lambda: pair.decode.load().num_generated_tokens > 150, "it streams")
        gated.gate.clear()
        await pair.decode._server.stop()
        for request, (tokens, reason) in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert tokens == MODEL.generate(request), request.request_id
            assert reason is FinishReason.LENGTH
        gated.gate.set()
        await assert_clean(pair.prefill)


async def test_a_request_whose_workers_keep_dying_is_failed_with_that_cause() -> None:
    async with running_controller() as controller, running_replayer(controller, max_attempts=2) as replayer:
        engines = [make_gated_engine(MODEL) for _ in range(3)]
        async with (
            running_worker(controller, engines[0][0], "mixed-0") as first,
            running_worker(controller, engines[1][0], "mixed-1") as second,
            running_worker(controller, engines[2][0], "mixed-2") as third,
        ):
            links = replayer.dispatcher._links
            await eventually(lambda: len(links) == 3 and all(link.is_open for link in links.values()), "connected")
            for _, runner in engines:
                runner.fails = True
            with pytest.raises(WorkerLostError, match=r"2 workers died while they held this request"):
                await generate(replayer, make_request("poison", [10, 11], max_tokens=5))
            failures = [worker.registration()[2] for worker in (first, second, third)]
            assert sum(failure is not None for failure in failures) == 2


async def test_blocks_that_were_not_gathered_yet_are_not_given_to_the_next_prompt() -> None:
    # known_faults B057; I4: a pool for three prompts, twelve at once, and a sender that is late
    prefill = make_digest_engine(MODEL, num_blocks=24, max_batch_tokens=128, has_prefix_cache=False)
    requests = [make_request(str(n), prompt, max_tokens=4) for n, prompt in enumerate(prompts_of([110] * 12))]
    transfer = transfer_config(TransportKind.SHM, max_slots_per_link=2)
    async with running_pair(transfer, prefill=prefill, make_source_copier=SlowCopier) as pair:
        results = await asyncio.gather(*(generate(pair.replayer, request) for request in requests))
        for request, (tokens, _) in zip(requests, results, strict=True):
            assert tokens == MODEL.generate(request)
        assert pair.decode.load().num_prefilled_tokens == 0
        await assert_clean(pair.prefill, pair.decode)


@pytest.mark.parametrize("token", [-5, MODEL.vocab_size, 2**40])
async def test_a_first_token_that_is_none_of_the_model_costs_the_source_its_channel(token: int) -> None:
    # I17; known_faults B071
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        source = pair.prefill._source
        assert source is not None
        take = source.take
        source.take = lambda deltas: take([replace(delta, token_ids=(token,)) for delta in deltas])  # type: ignore[method-assign]
        requests = [make_request(str(n), [10 + n] * 40, max_tokens=5) for n in range(2)]
        for request in requests:
            assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        assert pair.decode.registration()[2] is None
        await assert_clean(pair.decode)


@pytest.mark.parametrize(
    "change", [{"prompt_token_ids": (2**40,)}, {"sampling": replace(make_request("r", [1]).sampling, seed=-1)}]
)
async def test_a_prefill_with_numbers_that_cannot_be_is_rejected(change: dict[str, object]) -> None:
    # I17; known_faults B071
    async with running_pair(transfer_config(TransportKind.SHM)) as pair:
        (peer,) = pair.decode._sink._peers.all()  # type: ignore[union-attr]
        request = replace(make_request("bad", [10] * 20), **change)  # type: ignore[arg-type]
        transfer = TransferId(
            request_id=RequestId("bad"),
            attempt=0,
            transfer_no=99,
            source=peer.info.incarnation,
            sink=pair.decode.registration()[0].incarnation,
        )
        peer.post(Prefill(transfer=transfer, request=request, num_tokens_held=0, needs_kv=True, deadline_s=9.0))
        good = make_request("good", [10] * 40, max_tokens=5)
        assert (await generate(pair.replayer, good))[0] == MODEL.generate(good)
        assert pair.prefill.registration()[2] is None
        await assert_clean(pair.prefill, pair.decode)
