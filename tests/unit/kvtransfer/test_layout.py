"""Chunk arithmetic: every needed byte once, in chunks that fit; what the sink holds."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.base.kv_layout import ChunkRange, GroupLayout, KVDtype, KVLayout
from pdserve.kvtransfer.layout import Coverage, chunk_bytes, chunks_of, first_sent, layer_spans, plan_streams
from support.chunks import whole_stream

LAYOUT = KVLayout(
    model_digest="m",
    kv_dtype=KVDtype.FLOAT32,
    block_size=16,
    num_kv_heads=1,
    head_dim=4,
    groups=(GroupLayout(window=0, layers=(2, 5)), GroupLayout(window=24, layers=(0, 1, 3, 4, 6))),
)

STREAM = whole_stream(LAYOUT)


def all_chunks(num_tokens: int, num_held: int, step: int, slot_bytes: int) -> list[ChunkRange]:
    """Chunks of a prefill in steps of `step` tokens, in the order in which they become ready."""
    found = []
    for start in range(0, num_tokens, step):
        for span in layer_spans(LAYOUT, STREAM, slot_bytes):
            first = max(start, first_sent(LAYOUT, span.group, num_tokens, num_held))
            found += chunks_of(STREAM, span, first, min(start + step, num_tokens))
    return found


@given(st.integers(1, 120), st.integers(0, 6), st.integers(1, 70), st.integers(32, 4000))
def test_every_needed_token_of_every_layer_is_sent_once_in_chunks_that_fit(
    num_tokens: int, held_blocks: int, step: int, slot_bytes: int
) -> None:
    num_held = min(held_blocks * 16, num_tokens)
    sent: dict[tuple[int, int, int], int] = {}
    for chunk in all_chunks(num_tokens, num_held, step, slot_bytes):
        assert chunk.is_within(LAYOUT, num_tokens)
        assert 0 < chunk_bytes(STREAM, chunk) <= slot_bytes
        for layer in range(chunk.first_layer, chunk.end_layer):
            for token in range(chunk.first_token, chunk.end_token):
                sent[chunk.group, layer, token] = sent.get((chunk.group, layer, token), 0) + 1
    expected = {
        (group, layer, token)
        for group, spec in enumerate(LAYOUT.groups)
        for layer in range(len(spec.layers))
        for token in range(max(num_held, spec.first_needed(num_tokens - 1)), num_tokens)
    }
    assert sent == dict.fromkeys(expected, 1)


def test_a_window_sends_only_what_the_next_query_sees() -> None:
    # The query at position n sees n - 23 … n.
    assert LAYOUT.groups[1].first_needed(100) == 77
    assert LAYOUT.groups[1].first_needed(10) == 0
    assert LAYOUT.groups[0].first_needed(100) == 0


def test_spans_come_in_the_order_in_which_layers_are_computed() -> None:
    spans = layer_spans(LAYOUT, STREAM, 1 << 20)
    assert [span.last_layer for span in spans] == sorted(span.last_layer for span in spans)
    assert {span.end - span.first for span in spans} == {1, 2}


def test_a_slot_that_holds_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold one token"):
        layer_spans(LAYOUT, STREAM, 31)


@given(st.integers(1, 120), st.integers(1, 70), st.randoms(use_true_random=False))
def test_coverage_is_complete_exactly_when_everything_came(num_tokens: int, step: int, source: random.Random) -> None:
    # I8
    chunks = all_chunks(num_tokens, 0, step, 700)
    coverage = Coverage(LAYOUT)
    for chunk in source.sample(chunks, len(chunks)):
        assert not coverage.is_complete(num_tokens)
        coverage.add(0, chunk)
    assert coverage.is_complete(num_tokens)
    assert coverage.num_held(num_tokens) == num_tokens // 16 * 16


def test_what_is_held_is_whole_blocks_in_all_layers() -> None:
    coverage = Coverage(LAYOUT)
    assert coverage.num_held(60) == 0
    for chunk in all_chunks(60, 0, 20, 1 << 20)[:-1]:
        coverage.add(0, chunk)  # the last layers of the last 20 tokens are missing
    assert coverage.num_held(60) == 32
    # The window of position 32 starts at 9; the window group was only sent from 37 on.
    assert coverage.num_usable(60) == 0


@given(st.integers(1, 120), st.integers(1, 70), st.randoms(use_true_random=False))
def test_a_removed_chunk_is_held_no_more_and_the_last_token_is_never_usable(
    num_tokens: int, step: int, source: random.Random
) -> None:
    chunks = all_chunks(num_tokens, 0, step, 700)
    coverage = Coverage(LAYOUT)
    for chunk in (*chunks, *chunks):  # two tries that overlap
        coverage.add(0, chunk)
    assert coverage.num_usable(num_tokens) < num_tokens
    gone = source.choice(chunks)
    coverage.remove(0, gone)
    assert not coverage.is_complete(num_tokens)
    assert coverage.num_held(num_tokens) <= gone.first_token
    coverage.add(0, gone)
    assert coverage.is_complete(num_tokens)


def test_what_is_held_is_usable_if_the_windows_are_there() -> None:
    coverage = Coverage(LAYOUT)
    chunks = all_chunks(20, 0, 16, 1 << 20)
    for chunk in chunks[: len(chunks) // 2]:
        coverage.add(0, chunk)
    assert coverage.num_usable(20) == 16
    # For a prompt of 25 the first token is not sent: the last one does not see it, but one at position 16 does.
    assert coverage.num_held(25) == 16
    coverage = Coverage(LAYOUT)
    whole = list(all_chunks(25, 0, 16, 1 << 20))
    for chunk in whole[:-1]:
        coverage.add(0, chunk)
    assert (coverage.num_held(25), coverage.num_usable(25)) == (16, 0)
    # Until its window has come, what was held before still counts.
    held = Coverage(LAYOUT)
    held.add_prefix(64)
    assert held.num_usable(200) == 64
    full = [chunk for chunk in all_chunks(200, 64, 200, 1 << 20) if chunk.group == 0]
    for chunk in full:
        held.add(0, chunk)
    assert held.num_usable(200) == 64
    # With everything here only the last token is computed again.
    coverage.add(0, whole[-1])
    assert (coverage.num_held(25), coverage.num_usable(25)) == (16, 24)


@pytest.mark.parametrize(
    "chunk",
    [
        {"group": 2},
        {"group": -1},
        {"first_layer": 1},
        {"end_layer": 3},
        {"first_head": 1},
        {"end_head": 2},
        {"first_head": -1},
        {"first_token": -1},
        {"end_token": 61},
        {"end_token": 0},
        {"end_token": 2**62},
    ],
)
def test_ranges_of_a_peer_that_do_not_exist_are_seen(chunk: dict[str, int]) -> None:
    # I17
    right = ChunkRange(group=0, first_layer=0, end_layer=1, first_head=0, end_head=1, first_token=0, end_token=60)
    assert right.is_within(LAYOUT, 60)
    assert not replace(right, **chunk).is_within(LAYOUT, 60)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_digest": "other"}, "model_digest: 'm' here, 'other' there"),
        ({"num_kv_heads": 2}, "num_kv_heads: 1 here, 2 there"),
        ({"head_dim": 8}, "head_dim: 4 here, 8 there"),
        ({"groups": LAYOUT.groups[:1]}, "groups: "),
        ({"kv_dtype": "fp4"}, "kv_dtype: 'fp4' there, float32, float16, int8, bfloat16, float8 are known here"),
        ({"kv_dtype": "float8"}, "kv_dtype: 'float32' here, 'float8' there, which are not converted"),
        ({"block_size": 0}, "block_size: 0 there"),
        ({"tp_size": -1}, "tp_size: -1 there"),
        ({"tp_size": 2**40}, "tp_size: 1099511627776 there, at most 1024 are possible"),
    ],
)
def test_a_pair_that_cannot_exchange_kv_is_refused_with_the_field(change: dict[str, object], reason: str) -> None:
    # known_faults B069, B070
    refusal = LAYOUT.refusal(replace(LAYOUT, **change))  # type: ignore[arg-type]
    assert refusal is not None
    assert refusal.startswith(reason)


def test_block_size_dtype_and_ranks_may_differ_if_the_heads_can_be_shared_out() -> None:
    other = replace(LAYOUT, block_size=32, kv_dtype=KVDtype.INT8, tp_size=4)
    assert LAYOUT.refusal(other) is None
    six = replace(LAYOUT, num_kv_heads=6)
    assert six.refusal(replace(six, tp_size=4)) == ("tp_size: 4 there, which does not divide 6 KV heads, nor they it")


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("source_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("sink_ranks", [1, 2, 4, 8])
def test_every_rank_of_the_sink_gets_each_of_its_heads_once(heads: int, source_ranks: int, sink_ranks: int) -> None:
    # known_faults B067, B068
    source = replace(LAYOUT, num_kv_heads=heads, tp_size=source_ranks)
    sink = replace(LAYOUT, num_kv_heads=heads, tp_size=sink_ranks, kv_dtype=KVDtype.INT8)
    streams = plan_streams(source, sink)
    got = [(stream.sink_rank, head) for stream in streams for head in range(stream.first_head, stream.end_head)]
    assert sorted(got) == [(rank, head) for rank in range(sink_ranks) for head in range(*sink.heads_of(rank))]
    assert len({(stream.source_rank, stream.sink_rank) for stream in streams}) == len(streams)
    for stream in streams:
        first, end = source.heads_of(stream.source_rank)
        assert first <= stream.first_head < stream.end_head <= end
        assert stream.wire_dtype is KVDtype.INT8
    # Ranks that hold the same head share the sending.
    if source_ranks <= sink_ranks:
        assert len({stream.source_rank for stream in streams}) == source_ranks


def test_coverage_wants_every_head_of_every_rank() -> None:
    layout = replace(LAYOUT, num_kv_heads=2, tp_size=4, groups=(GroupLayout(window=0, layers=(0,)),))
    coverage = Coverage(layout)
    for rank in range(4):
        assert not coverage.is_complete(20)
        first, end = layout.heads_of(rank)
        coverage.add(
            rank,
            ChunkRange(
                group=0, first_layer=0, end_layer=1, first_head=first, end_head=end, first_token=0, end_token=20
            ),
        )
    assert coverage.is_complete(20)
    assert coverage.num_held(20) == 16
