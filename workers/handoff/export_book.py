"""Rank 0's book of the prefills whose KV goes to sinks: what each step ships, and which blocks that pins.

`begin_step` is called by the engine thread; it tells the ranks, through the step, what to ship, counts the chunks that
they will announce, and pins the blocks until all of them have released the step. So the sequence may end, or be put
back, meanwhile (I4).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.kv_layout import KVLayout
from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.kvtransfer.layout import LayerSpan, Stream, chunks_of, first_sent, layer_spans
from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.plan import Int32
from pdserve.workers.engine.rank_step import Exported, ExportedStep
from pdserve.workers.engine.scheduler import PlannedPrefill
from pdserve.workers.handoff.exports import RankExporter


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The streams of a pair, and in which spans of layers each travels."""

    streams: tuple[Stream, ...]
    spans: tuple[tuple[LayerSpan, ...], ...]


def plan_pair(layout: KVLayout, streams: tuple[Stream, ...], slot_bytes: int) -> PairPlan:
    """Return the plan of a pair. Raises ValueError if a slot does not hold one token of one layer."""
    return PairPlan(streams, tuple(layer_spans(layout, stream, slot_bytes) for stream in streams))


@dataclass(slots=True, kw_only=True)
class Export:
    """One prefill whose KV goes to a sink. Without a plan nothing is shipped."""

    transfer: TransferId
    pair_no: int
    num_tokens: int
    num_sink_tokens: int
    plan: PairPlan | None
    is_void: bool = False
    has_started: bool = False
    is_shipped: bool = False
    """True once a step has told the ranks of it: then they are told of its end too."""
    num_computed: int = 0
    num_chunks: list[int] = field(default_factory=list)
    """Chunks that the ranks were told to announce so far, in each stream."""
    sent_until: int = 0

    def __post_init__(self) -> None:
        self.num_chunks = [0] * (0 if self.plan is None else len(self.plan.streams))


@dataclass(slots=True)
class _Pins:
    blocks: list[tuple[int, Int32]]
    """By KV group."""
    num_ranks: int
    """That have not released the step."""


class ExportBook:
    """See KVExports; `begin_step` and `layer_done` run on the engine thread, everything else on the loop."""

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        exporters: Sequence[RankExporter],
        *,
        on_start: Callable[[TransferId], None],
    ) -> None:
        """`exporters` are those of the ranks in this process.

        `on_start` is called when the engine computes an export for the first time; it must not block.
        """
        self._layout = layout
        self._pool = pool
        self._exporters = exporters
        self._on_start = on_start
        self._exports: dict[RequestId, Export] = {}
        self._pins: dict[tuple[TransferId, int], _Pins] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Exports known, and steps not released."""
        return len(self._exports) + len(self._pins)

    def add(self, request_id: RequestId, export: Export) -> None:
        """Ship what the engine computes for this request; before the request is submitted."""
        with self._lock:
            self._exports[request_id] = export

    def void(self, export: Export) -> bool:
        """Ship nothing more of it; True if the ranks must be told to drop it."""
        with self._lock:
            is_news = not export.is_void
            export.is_void = True
            return is_news and export.is_shipped

    def remove(self, request_id: RequestId) -> None:
        """Forget an export that is void."""
        with self._lock:
            del self._exports[request_id]

    def released(self, transfer: TransferId, end_token: int) -> None:
        """A rank will not read what the step to `end_token` announced from its blocks any more."""
        key = transfer, end_token
        with self._lock:
            pins = self._pins[key]
            pins.num_ranks -= 1
            if pins.num_ranks:
                return
            del self._pins[key]
        for group, blocks in pins.blocks:
            self._pool.unpin(group, blocks)

    def begin_step(self, prefills: Sequence[PlannedPrefill]) -> Exported:
        """See KVExports."""
        steps = []
        for prefill in prefills:
            with self._lock:
                export = self._exports.get(prefill.request_id)
                if export is None:
                    continue
                step = self._plan(export, prefill)
            if not export.has_started:
                export.has_started = True
                self._on_start(export.transfer)
            if step is not None:
                steps.append(step)
        for exporter in self._exporters:
            exporter.begin_step(steps)
        return steps

    def layer_done(self, layer: int) -> None:
        """See KVExports."""
        for exporter in self._exporters:
            exporter.layer_done(layer)

    def _plan(self, export: Export, prefill: PlannedPrefill) -> ExportedStep | None:
        export.num_computed = prefill.first_token
        # A prefill that was put back computes again what was shipped already.
        if export.plan is None or export.is_void or prefill.end_token <= export.sent_until:
            return None
        step = ExportedStep(
            pair_no=export.pair_no,
            transfer=export.transfer,
            num_tokens=export.num_tokens,
            num_sink_tokens=export.num_sink_tokens,
            send_from=export.sent_until,
            end_token=prefill.end_token,
            first_chunks=tuple(export.num_chunks),
            blocks=tuple(self._table(blocks, prefill.end_token) for blocks in prefill.blocks),
        )
        export.is_shipped = True
        export.sent_until = prefill.end_token
        self._count(export, export.plan, step)
        self._pin(step)
        return step

    def _table(self, blocks: Sequence[int], end_token: int) -> Int32:
        return np.array(blocks[: -(-end_token // self._layout.block_size)], np.int32)

    def _count(self, export: Export, plan: PairPlan, step: ExportedStep) -> None:
        for number, (stream, spans) in enumerate(zip(plan.streams, plan.spans, strict=True)):
            for span in spans:
                first = self._first(step, span.group)
                export.num_chunks[number] += sum(1 for _ in chunks_of(stream, span, first, step.end_token))

    def _first(self, step: ExportedStep, group: int) -> int:
        return max(step.send_from, first_sent(self._layout, group, step.num_tokens, step.num_sink_tokens))

    def _pin(self, step: ExportedStep) -> None:
        # A rank that sends nothing of this pair releases the step too.
        pins = _Pins([], self._layout.tp_size)
        for group, table in enumerate(step.blocks):
            first = self._first(step, group)
            if first < step.end_token:
                blocks = table[first // self._layout.block_size :]
                self._pool.pin(group, blocks)
                pins.blocks.append((group, blocks))
        self._pins[step.transfer, step.end_token] = pins
