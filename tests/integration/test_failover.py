"""A link that breaks in the middle of a transfer: the next transport goes on, from the buffers that are held."""

import asyncio

import pytest

from pdserve.cluster.base.config import TransferConfig, TransportKind
from pdserve.workers.model.digest import DigestModel
from pdserve.workers.worker import Worker
from support.engines import make_digest_engine, make_request
from support.fragile_transports import FragileTransports
from support.pairs import Pair, assert_clean, has_link, received_bytes, running_pair
from support.runners import GatedCopier, GatedRunner, make_gated_engine
from support.services import MODEL, eventually, generate, running_worker

OTHERS = {kind: next(other for other in TransportKind if other is not kind) for kind in TransportKind}
LENGTH = 200
WIDE = DigestModel(num_heads=4, tp_size=4)


@pytest.fixture(autouse=True)
def _fragile_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker has transports that can be killed."""
    monkeypatch.setattr("pdserve.workers.handoff.ranks.Transports", FragileTransports)


def kill(worker: Worker, kind: TransportKind) -> None:
    fragile(worker).killed.add(kind.value)


def fragile(worker: Worker) -> FragileTransports:
    transports = worker._ranks.local.transports  # type: ignore[union-attr]
    assert isinstance(transports, FragileTransports)
    return transports


async def let_layers_pass(pair: Pair, runner: GatedRunner, count: int) -> None:
    for number in range(runner.num_layers_done + 1, count + 1):
        await eventually(lambda number=number: runner.num_layers_done >= number, f"layer {number}")
        runner.layer_gate.set()
        runner.layer_gate.clear()


def transports_of(worker: Worker) -> set[str]:
    return {link.transport for link in worker.load().links}


@pytest.mark.parametrize("first", TransportKind)
async def test_a_transfer_goes_on_over_the_next_transport_and_nothing_is_computed_again(first: TransportKind) -> None:
    # known_faults B059, B063; I4, I8, I13
    engine, runner = make_gated_engine(MODEL, max_batch_tokens=64)
    transfer = TransferConfig(transports=(first, OTHERS[first]), slot_bytes=64 << 10)
    async with running_pair(transfer, prefill=engine) as pair:
        assert transports_of(pair.decode) == {first.value}
        runner.layer_gate.clear()
        request = make_request("r", list(range(10, 10 + LENGTH)), max_tokens=8)
        task = asyncio.create_task(generate(pair.replayer, request))
        await let_layers_pass(pair, runner, 5)
        await eventually(lambda: received_bytes(pair.decode) > 0, "the first chunks have come")
        kill(pair.prefill, first)
        runner.layer_gate.set()
        assert (await task)[0] == MODEL.generate(request)
        assert pair.prefill.load().num_prefilled_tokens == LENGTH
        assert pair.decode.load().num_prefilled_tokens == 0
        assert transports_of(pair.decode) == {OTHERS[first].value}
        assert "pdserve_kv_failovers_total 1.0" in pair.decode.metrics_text()
        (timeline,) = pair.decode.traces("r")
        assert "goes on over the next one" in timeline
        await assert_clean(pair.prefill, pair.decode)


@pytest.mark.parametrize("first", TransportKind)
async def test_what_lay_in_slots_and_was_not_credited_is_sent_again(first: TransportKind) -> None:
    copiers: list[GatedCopier] = []

    def make_copier(store: object) -> GatedCopier:
        copiers.append(GatedCopier(store))  # type: ignore[arg-type]
        return copiers[-1]

    transfer = TransferConfig(transports=(first, OTHERS[first]), slot_bytes=64 << 10, max_slots_per_link=3)
    async with running_pair(transfer, make_copier=make_copier) as pair:
        copiers[0].gate.clear()
        request = make_request("r", list(range(10, 10 + LENGTH)), max_tokens=8)
        task = asyncio.create_task(generate(pair.replayer, request))
        # Every slot is taken: one chunk is being scattered, two wait; the others are ready and wait for slots.
        await eventually(lambda: pair.prefill._source._sinks and outstanding(pair) == 3, "the slots are full")  # type: ignore[union-attr]
        kill(pair.prefill, first)
        copiers[0].gate.set()
        assert (await task)[0] == MODEL.generate(request)
        assert pair.prefill.load().num_prefilled_tokens == LENGTH
        assert transports_of(pair.decode) == {OTHERS[first].value}
        await assert_clean(pair.prefill, pair.decode)


def outstanding(pair: Pair) -> int:
    links = pair.prefill._ranks.local.sources[0].links_of(1).links()  # type: ignore[union-attr]
    return sum(link.sender.num_outstanding for link in links)


async def test_a_better_transport_is_taken_again_when_it_has_rested_and_nothing_is_on_its_way() -> None:
    # known_faults B063
    transfer = TransferConfig(transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10)
    async with running_pair(transfer) as pair:
        kill(pair.prefill, TransportKind.SHM)
        request = make_request("r", [10] * LENGTH, max_tokens=3)
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        assert transports_of(pair.decode) == {"tcp"}
        fragile(pair.prefill).killed.clear()
        gaps = 0

        def is_back() -> bool:
            nonlocal gaps
            gaps += not has_link(pair.decode)
            return transports_of(pair.decode) == {"shm"}

        await eventually(is_back, "shm again")
        # It was tried beside the link that worked.
        assert gaps == 0
        again = make_request("again", [11] * LENGTH, max_tokens=3)
        assert (await generate(pair.replayer, again))[0] == MODEL.generate(again)
        await assert_clean(pair.prefill, pair.decode)


async def test_a_transfer_that_loses_every_link_ends_and_its_request_goes_on() -> None:
    # I5: at once, not by its deadline
    transfer = TransferConfig(
        transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10, streaming_timeout_s=60.0
    )
    async with running_pair(transfer) as pair:
        for kind in (TransportKind.SHM, TransportKind.TCP):
            kill(pair.prefill, kind)
        request = make_request("r", [10] * LENGTH, max_tokens=3)
        assert (await generate(pair.replayer, request))[0] == MODEL.generate(request)
        assert pair.decode.load().num_prefilled_tokens > 0
        await assert_clean(pair.prefill, pair.decode)


async def test_each_link_of_a_pair_of_many_ranks_may_break_once() -> None:
    engine, runner = make_gated_engine(WIDE, max_batch_tokens=64)
    transfer = TransferConfig(transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10)
    async with running_pair(transfer, prefill=engine, decode=make_digest_engine(WIDE)) as pair:
        assert len(pair.decode.load().links) == 4
        runner.layer_gate.clear()
        request = make_request("r", list(range(10, 10 + LENGTH)), max_tokens=8)
        task = asyncio.create_task(generate(pair.replayer, request))
        await let_layers_pass(pair, runner, 5)
        kill(pair.prefill, TransportKind.SHM)
        runner.layer_gate.set()
        assert (await task)[0] == WIDE.generate(request)
        assert pair.decode.load().num_prefilled_tokens == 0
        assert transports_of(pair.decode) == {"tcp"}
        await assert_clean(pair.prefill, pair.decode)


async def test_a_link_for_which_there_is_no_room_opens_when_there_is() -> None:
    transfer = TransferConfig(
        transports=(TransportKind.SHM, TransportKind.TCP), slot_bytes=64 << 10, max_slots=3, max_slots_per_link=2
    )
    async with (
        running_pair(transfer) as pair,
        running_worker(pair.controller, name="decode-1", transfer=transfer) as second,
    ):
        await asyncio.sleep(0.6)
        assert not has_link(second)
        assert has_link(pair.decode)
        await pair.decode.stop()
        await eventually(lambda: has_link(second), "there is room")
        # It was not taken for a transport that fails.
        assert transports_of(second) == {"shm"}
