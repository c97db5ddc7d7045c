"""Reservations, and sequences that join with their KV."""

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.errors import InvalidRequestError
from pdserve.workers.engine.block_pool import NO_BLOCK
from pdserve.workers.engine.engine import Engine
from pdserve.workers.engine.reservation import Reservation
from pdserve.workers.engine.scheduler import SchedulerSettings
from pdserve.workers.model.digest import DigestModel, DigestRunner
from support.engines import make_digest_engine, make_request, prompts_of, run

MODEL = DigestModel()


def test_a_reservation_holds_a_row_and_blocks_until_it_is_released() -> None:
    engine = make_digest_engine(MODEL, num_blocks=16, max_running=2)
    reservations = engine.scheduler.reservations
    first = reservations.reserve(39)
    assert first is not None
    assert (engine.pool.num_free(0), engine.pool.num_available(0)) == (16, 13)
    second = reservations.reserve(15)
    assert second is not None
    assert reservations.reserve(15) is None, "no row is left"
    reservations.bind(first)
    assert engine.pool.num_free(0) == 13
    assert [len(blocks) for blocks in first.blocks] == [3, 3]
    engine.scheduler.validate()
    for reservation in (first, second):
        reservations.release(reservation)
    assert (engine.pool.num_available(0), len(reservations)) == (16, 0)
    engine.scheduler.validate()


def test_a_bound_reservation_grows_only_if_there_is_room() -> None:
    engine = make_digest_engine(MODEL, num_blocks=4)
    reservations = engine.scheduler.reservations
    reservation = reservations.reserve(32)
    assert reservation is not None
    reservations.bind(reservation)
    assert reservations.grow(reservation, 48)
    assert reservations.grow(reservation, 64)
    assert not reservations.grow(reservation, 65)
    assert [len(blocks) for blocks in reservation.blocks] == [4, 4]
    engine.scheduler.validate()


def join_after_prefill(num_computed: int) -> tuple[list[int], list[int]]:
    """Return a request's whole text, and what comes out if another engine prefilled it and this one got its KV."""
    prompt, sampling = range(10, 60), {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    request = make_request("r", prompt, **sampling)  # type: ignore[arg-type]
    source, sink = make_digest_engine(MODEL), make_digest_engine(MODEL)
    source.scheduler.add(request, is_prefill_only=True)
    (delta,) = source.step()  # one step takes the whole prompt
    assert (delta.finish_reason, source.scheduler.has_work, source.pool.num_free(0)) == (None, False, 64)
    reservation = sink.scheduler.reservations.reserve(50)
    assert reservation is not None
    sink.scheduler.reservations.bind(reservation)
    copy_kv(source.runner, sink.runner, reservation)
    if num_computed < 48:
        sink.scheduler.reservations.trim(reservation, num_computed)
    resumed = make_request("r", prompt, resume=delta.token_ids, **sampling)  # type: ignore[arg-type]
    sink.scheduler.join(resumed, reservation, num_computed)
    tokens = list(delta.token_ids)
    while sink.scheduler.has_work:
        sink.scheduler.validate()
        for item in sink.step():
            assert item.index == len(tokens)
            tokens += item.token_ids
    assert sink.pool.num_free(0) == 64
    return MODEL.generate(request), tokens


def copy_kv(source: object, sink: object, reservation: Reservation) -> None:
    """Copy the first request's blocks of a fresh engine, which are 3, 2, 1, 0, into the reservation's."""
    assert isinstance(source, DigestRunner)
    assert isinstance(sink, DigestRunner)
    for group, spec in enumerate(source.store.layout.groups):
        for layer in spec.layers:
            for place, block in enumerate(reservation.blocks[group]):
                if block == NO_BLOCK:
                    continue
                sink.store.layer(layer)[block] = source.store.layer(layer)[3 - place]


@pytest.mark.parametrize("num_computed", [50, 48, 0])
def test_a_sequence_that_joins_with_kv_goes_on_as_if_it_had_been_computed_here(num_computed: int) -> None:
    expected, tokens = join_after_prefill(num_computed)
    assert tokens == expected


def test_a_second_copy_cannot_join_and_keeps_its_reservation() -> None:
    engine = make_digest_engine(MODEL)
    request = make_request("r", [10, 11], max_tokens=3)
    engine.scheduler.add(request)
    reservation = engine.scheduler.reservations.reserve(2)
    assert reservation is not None
    with pytest.raises(InvalidRequestError, match="already here"):
        engine.scheduler.join(request, reservation, 0)
    engine.scheduler.reservations.release(reservation)
    engine.scheduler.validate()


def test_local_work_and_reservations_share_rows_and_blocks_without_a_deadlock() -> None:
    # I15, known_faults B066
    engine = make_digest_engine(MODEL, num_blocks=12, max_running=3)
    reservation = engine.scheduler.reservations.reserve(39)
    assert reservation is not None
    engine.scheduler.reservations.bind(reservation)
    requests = [make_request(str(n), [10 + n] * 20, max_tokens=70) for n in range(3)]
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(400):
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
        engine.scheduler.validate()
    # 20 + 70 tokens take 6 of the 9 blocks left: they run one or two at a time, and all finish beside the reservation.
    assert outputs == {request.request_id: MODEL.generate(request) for request in requests}
    assert engine.scheduler.num_preemptions > 0
    engine.scheduler.reservations.release(reservation)
    assert engine.pool.num_available(0) == 12


def test_a_hit_for_which_there_is_no_second_window_is_given_up() -> None:
    model = DigestModel(windows=(0, 100))
    runner = DigestRunner(model, num_blocks=(64, 12), block_size=16)
    settings = SchedulerSettings(block_size=16, max_running=4, max_batch_tokens=16, max_waiting=9, max_model_len=1024)
    engine = Engine(
        settings, runner, layout=runner.store.layout, num_blocks=(64, 12), clock=ManualClock(), promised_share=1.0
    )
    text = prompts_of([400])[0]
    run(engine, [make_request("seed", text[:161], max_tokens=1)])
    request = make_request("r", text, max_tokens=50)
    engine.scheduler.check(request)
    reservation = engine.scheduler.reservations.reserve(400, engine.scheduler.prefix_names(request))
    assert reservation is not None
    assert reservation.num_cached_blocks == 0
    engine.scheduler.reservations.release(reservation)
    assert engine.pool.is_all_free


def test_trimming_forgets_what_is_no_longer_held() -> None:
    engine = make_digest_engine(DigestModel(windows=(0,)))
    text = prompts_of([100])[0]
    run(engine, [make_request("seed", text, max_tokens=1)])
    names = engine.scheduler.prefix_names(make_request("r", text))
    reservation = engine.scheduler.reservations.reserve(100, names)
    assert reservation is not None
    assert reservation.num_cached_blocks == 6
    engine.scheduler.reservations.trim(reservation, 32)
    assert reservation.num_cached_blocks == 2
    engine.scheduler.join(make_request("r", text, max_tokens=2), reservation, 32)
    while engine.has_work:
        (delta,) = engine.step() or (None,)
        if delta is not None and delta.index == 0:
            assert delta.num_cached_tokens == 32
        engine.scheduler.validate()
