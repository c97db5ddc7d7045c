"""The life of links and transfers: who moves to which state, who learns what, first terminal event wins."""

import random
from dataclasses import replace

import pytest

from pdserve.cluster.base.clock import ManualClock
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import ChunkRange, GroupLayout, KVDtype, KVLayout
from pdserve.cluster.base.request import FinishReason, TokenDelta
from pdserve.kvtransfer.layout import Coverage
from pdserve.kvtransfer.link import LinkEvent, LinkLife, LinkState
from pdserve.kvtransfer.reaper import Reaper
from pdserve.kvtransfer.sink import (
    BindBlocks,
    EmitFirstToken,
    JoinBatch,
    PostAbort,
    PostCommit,
    SinkInstruction,
    SinkState,
    SinkTransfer,
    TransferEnded,
    Unbind,
)
from pdserve.kvtransfer.source import SendAbort, SendFinal, SendFirstToken, SourceState, SourceTransfer, StopWork
from pdserve.kvtransfer.table import IllegalTransitionError
from support.chunks import whole_stream

LAYOUT = KVLayout(
    model_digest="m",
    kv_dtype=KVDtype.FLOAT32,
    block_size=16,
    num_kv_heads=1,
    head_dim=2,
    groups=(GroupLayout(window=0, layers=(0,)),),
)
FIRST = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=0, end_token=16)
SECOND = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=16, end_token=20)
SAMPLED = TokenDelta(request_id=RequestId("at-source"), attempt=0, index=0, token_ids=(7,))
LAST = replace(SAMPLED, finish_reason=FinishReason.STOP)
TOKEN = EmitFirstToken(token=SAMPLED)


def sink(*, needs_kv: bool = True) -> SinkTransfer:
    return SinkTransfer(Coverage(LAYOUT), 20, [whole_stream(LAYOUT)], needs_kv=needs_kv)


def test_a_sink_commits_when_counts_and_coverage_are_met_whatever_comes_last() -> None:
    # I8
    orders = [
        ["token", "final", "first", "second"],
        ["first", "second", "token", "final"],
        ["second", "token", "first", "final"],
    ]
    for order in orders:
        transfer = sink()
        assert transfer.started() == [BindBlocks()]
        events = {
            "token": lambda transfer=transfer: transfer.first_token(SAMPLED),
            "final": lambda transfer=transfer: transfer.final((2,)),
            "first": lambda transfer=transfer: transfer.chunk_verified(0, 0, FIRST),
            "second": lambda transfer=transfer: transfer.chunk_verified(0, 1, SECOND),
        }
        instructions: list[SinkInstruction] = []
        for name in order:
            instructions += events[name]()
        assert [item for item in instructions if item != TOKEN] == [PostCommit(), JoinBatch()]
        assert transfer.state is SinkState.COMMITTED


def test_right_counts_without_coverage_fail_instead_of_decoding() -> None:
    # I8, I12
    transfer = sink()
    transfer.started()
    transfer.first_token(SAMPLED)
    transfer.chunk_verified(0, 0, FIRST)
    transfer.chunk_verified(0, 1, FIRST)
    instructions = transfer.final((2,))
    assert instructions == [PostAbort(reason="the chunks do not cover the prompt"), Unbind()]
    assert transfer.unbound() == [TransferEnded(cause="the chunks do not cover the prompt")]
    assert transfer.state is SinkState.FAILED


def test_a_first_token_that_ends_the_request_commits_without_a_batch() -> None:
    # I18: the reason is the source's sampler's.
    transfer = sink()
    transfer.started()
    ending = transfer.first_token(LAST)
    assert ending == [EmitFirstToken(token=LAST), PostCommit(), Unbind()]
    assert transfer.chunk_verified(0, 0, FIRST) == []
    assert transfer.final((2,)) == []
    assert transfer.failed("late", tell_source=True) == []
    assert transfer.unbound() == [TransferEnded(cause=None)]
    assert transfer.state is SinkState.COMMITTED


def test_a_second_first_token_is_not_emitted() -> None:
    # I18
    transfer = sink()
    transfer.started()
    assert transfer.first_token(SAMPLED) == [TOKEN]
    assert transfer.first_token(replace(SAMPLED, token_ids=(8,))) == []


def test_without_kv_nothing_is_bound() -> None:
    transfer = sink(needs_kv=False)
    assert transfer.started() == []
    assert PostCommit() in transfer.first_token(replace(SAMPLED, finish_reason=FinishReason.LENGTH))


@pytest.mark.parametrize("tell_source", [True, False])
def test_a_failure_frees_blocks_only_after_unbinding(tell_source: bool) -> None:
    # I7
    transfer = sink()
    transfer.started()
    told = [PostAbort(reason="gone")] if tell_source else []
    assert transfer.failed("gone", tell_source=tell_source) == [*told, Unbind()]
    assert transfer.failed("again", tell_source=True) == []
    assert transfer.unbound() == [TransferEnded(cause="gone")]
    assert transfer.unbound() == []


def test_a_failure_before_the_start_ends_at_once() -> None:
    transfer = sink()
    assert transfer.failed("rejected", tell_source=False) == [TransferEnded(cause="rejected")]
    assert transfer.started() == []


def test_a_chunk_that_is_counted_before_the_start_is_our_fault() -> None:
    with pytest.raises(IllegalTransitionError, match="chunk verified in offered"):
        sink().chunk_verified(0, 0, FIRST)


def test_every_attempt_of_a_sink_ends_once_under_random_events() -> None:
    # I5
    for seed in range(300):
        rng = random.Random(seed)
        transfer = sink()
        endings: list[SinkInstruction] = []
        log: list[SinkInstruction] = []
        events = [
            lambda transfer=transfer: transfer.started(),
            lambda transfer=transfer: transfer.chunk_verified(0, 0, FIRST),
            lambda transfer=transfer: transfer.chunk_verified(0, 1, SECOND),
            lambda transfer=transfer, rng=rng: transfer.first_token(rng.choice([SAMPLED, SAMPLED, LAST])),
            lambda transfer=transfer: transfer.final((2,)),
            lambda transfer=transfer: transfer.failed("x", tell_source=True),
        ]
        while not transfer.has_ended:
            instructions = (
                transfer.unbound()
                if transfer.state is SinkState.UNBINDING and rng.random() < 0.3
                else rng.choice(events[:1] if transfer.state is SinkState.OFFERED else events)()
            )
            log += instructions
        endings = [item for item in log if isinstance(item, TransferEnded | JoinBatch)]
        assert len(endings) == 1, transfer.history
        assert len([item for item in log if isinstance(item, PostCommit | PostAbort)]) == 1
        for event in events:
            assert event() == [], transfer.history


def test_a_source_says_final_once_after_token_and_chunks() -> None:
    transfer = SourceTransfer()
    transfer.started()
    assert transfer.chunk_sent(is_first=True) == []
    assert transfer.state is SourceState.STREAMING
    transfer.chunk_credited()
    assert transfer.state is SourceState.RUNNING
    assert transfer.prefilled(SAMPLED, 2) == [SendFirstToken(token=SAMPLED)]
    assert transfer.chunk_sent(is_first=True) == [SendFinal()]
    assert transfer.chunk_sent(is_first=False) == []
    assert transfer.state is SourceState.SENT
    assert transfer.committed() == [StopWork()]
    assert transfer.failed("late") == transfer.aborted() == transfer.committed() == []


def test_a_source_without_chunks_is_final_at_once() -> None:
    transfer = SourceTransfer()
    transfer.started()
    assert transfer.prefilled(replace(SAMPLED, finish_reason=FinishReason.LENGTH), 0)[1:] == [SendFinal()]


@pytest.mark.parametrize("num_steps", range(5))
def test_a_failing_source_tells_its_sink_in_every_state(num_steps: int) -> None:
    # I5, I11
    transfer = SourceTransfer()
    steps = [
        transfer.started,
        lambda: transfer.chunk_sent(is_first=True),
        lambda: transfer.prefilled(SAMPLED, 1),
        transfer.chunk_credited,
    ]
    for step in steps[:num_steps]:
        step()
    assert transfer.failed("engine") == [SendAbort(reason="engine"), StopWork()]
    assert transfer.state is SourceState.FAILED
    assert transfer.prefilled(SAMPLED, 1) == []


def test_a_link_opens_by_its_test_and_ends_by_its_fence() -> None:
    life = LinkLife()
    assert not life.is_usable
    for event in (LinkEvent.ATTACHED, LinkEvent.TESTED):
        life.apply(event)
    assert life.is_usable
    life.apply(LinkEvent.STALLED)
    assert not life.is_usable
    life.apply(LinkEvent.CREDITED)
    assert life.is_usable
    life.apply(LinkEvent.LOST)
    life.apply(LinkEvent.FENCED)
    assert life.state is LinkState.CLOSED
    assert not life.apply(LinkEvent.TESTED)
    assert life.num_late_events == 1


def test_a_link_is_not_usable_without_its_test() -> None:
    life = LinkLife()
    with pytest.raises(IllegalTransitionError, match="tested in opening"):
        life.apply(LinkEvent.TESTED)


def test_the_reaper_counts_from_the_last_progress() -> None:
    # I6
    clock = ManualClock()
    reaper: Reaper[str] = Reaper(clock)
    reaper.watch("a", 3.0, 1)
    reaper.watch("b", 10.0, 1)
    clock.advance(2.0)
    reaper.watch("a", 3.0, 2)
    clock.advance(2.0)
    assert reaper.overdue() == []
    reaper.watch("a", 3.0, 2)  # the same mark is no progress
    clock.advance(1.5)
    assert reaper.overdue() == [("a", 3.0)]
    assert reaper.overdue() == []
    assert reaper.oldest_s == 5.5
    reaper.forget("b")
    clock.advance(100.0)
    assert reaper.overdue() == []
