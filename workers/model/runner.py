"""Runs step plans on a rank of a loaded model: metadata, forward pass, head, sampling.

Owns the model and the KV store of a rank. Called by the engine thread only. Rank 0 samples and leads; the others follow
what it sends them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numba
import numpy as np
import torch

from pdserve.workers.attention.protocol import build_metadata
from pdserve.workers.engine.plan import ForwardPlan, Int32, StepOutput, StepPlan
from pdserve.workers.engine.rank_step import BlockCopy, Copies, CopyKind, Exported, Followers, RankStep
from pdserve.workers.kv.host_tier import HostSlots
from pdserve.workers.kv.store import KVStore
from pdserve.workers.model.graphs import GraphedDecoder
from pdserve.workers.model.head import rows_needed_whole
from pdserve.workers.model.loader import LoadedModel

OnLayer = Callable[[int], None]


class ModelRunner(Protocol):
    """What the engine asks of a model."""

    def bind_thread(self) -> None:
        """Called once by the thread that will call execute."""

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """Compute the plan; return one token per sampled row. Then the step is over on every rank and its device.

        `on_layer` is called with each layer's number once the KV of the step's tokens is in the store; `exported` is
        what of it goes to sinks; `copies` were made here, and are made by the other ranks before they compute. Raises
        RankLostError if another rank takes no part.
        """

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a block's KV in all layers of a group, on this rank; between steps."""

    def settle(self, copies: Copies) -> None:
        """Let the other ranks make copies without a step, and wait until they have. Raises RankLostError."""


class RankRunner:
    """What every rank does."""

    def __init__(self, model: LoadedModel, store: KVStore, *, num_threads: int) -> None:
        self._model = model
        self._store = store
        self._num_threads = num_threads
        self._device = store.layer(0).device
        self._windows = tuple(group.window for group in model.spec.groups)
        self._graphs: GraphedDecoder | None = None

    def capture_graphs(self, *, max_rows: int, max_tokens: int) -> None:
        """Capture decode steps of up to `max_rows` rows and texts of `max_tokens`, on a GPU; all ranks at once."""
        graphs = GraphedDecoder(
            self._model.decoder, self._store, self._windows, max_rows=max_rows, max_tokens=max_tokens
        )
        with torch.inference_mode():
            graphs.capture()
        self._graphs = graphs

    @property
    def store(self) -> KVStore:
        """Where the KV of its steps goes."""
        return self._store

    @property
    def num_groups(self) -> int:
        """KV groups of the model."""
        return len(self._windows)

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self._model.spec.vocab_size

    def bind_thread(self) -> None:
        """Set the thread counts of torch and numba for the calling thread."""
        # numba first: where it starts its threads, it sets OpenMP's count for this thread, which is torch's too.
        numba.set_num_threads(min(self._num_threads, numba.config.NUMBA_NUM_THREADS))
        torch.set_num_threads(self._num_threads)

    def _barrier(self) -> None:
        """Wait until every rank has come here."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._model.group.all_reduce_min(0.0)

    def _forward(self, plan: ForwardPlan, logits_indices: Int32, on_layer: OnLayer | None) -> torch.Tensor:
        hidden = self._compute(plan, logits_indices, on_layer)
        if not len(hidden):
            # No logits follow, for which rank 0 would wait; after the step nobody writes to blocks of a dropped text.
            self._barrier()
        return hidden

    def _compute(self, plan: ForwardPlan, logits_indices: Int32, on_layer: OnLayer | None) -> torch.Tensor:
        if self._graphs is not None and on_layer is None:
            hidden = self._graphs.replay(plan, logits_indices)
            if hidden is not None:
                return hidden
        step = build_metadata(plan, self._windows, self._store.block_size)
        token_ids = torch.from_numpy(plan.token_ids).to(self._device, torch.long)
        indices = torch.from_numpy(logits_indices).to(self._device, torch.long)
        return self._model.decoder.forward(token_ids, step, self._store, indices, on_layer)


class TransformerRunner(RankRunner):
    """The runner of rank 0."""

    def __init__(
        self, model: LoadedModel, store: KVStore, *, num_threads: int, followers: Followers | None = None
    ) -> None:
        """`followers` are the other ranks, None if there are none."""
        super().__init__(model, store, num_threads=num_threads)
        self._followers = followers

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the model is not in the bitwise class; empty when it may be."""
        return self._model.notes

    def execute(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> StepOutput:
        """See ModelRunner.execute."""
        self._broadcast(plan, exported, copies, wants_logits=False)
        with torch.inference_mode():
            hidden = self._forward(plan, plan.logits_indices, on_layer)
            num_sampled, head = len(plan.sample_rows), self._model.head
            output = StepOutput(token_ids=np.empty(0, np.int32))
            if num_sampled:
                output = head.sample(hidden[:num_sampled], plan.sampling)
            if plan.scored is not None:
                output = replace(output, scores=head.score(hidden[num_sampled:], plan.scored))
            return output

    def copy_block(self, group: int, source: int, target: int) -> None:
        """See ModelRunner."""
        self._store.copy_block(group, source, target)

    def settle(self, copies: Copies) -> None:
        """See ModelRunner."""
        if self._followers is None:
            return
        none = np.empty(0, np.int32)
        self._followers.broadcast(
            RankStep(
                copies=tuple(copies),
                forward=None,
                logits_indices=none,
                num_sampled=0,
                is_whole=none.astype(np.bool_),
                wants_logits=False,
                exported=(),
            )
        )
        self._barrier()

    def logits(
        self, plan: StepPlan, on_layer: OnLayer | None = None, exported: Exported = (), copies: Copies = ()
    ) -> torch.Tensor:
        """Compute the plan; return fp32 logits of its sampled rows, [S, V]. For tests and the self-test."""
        self._broadcast(plan, exported, copies, wants_logits=True)
        with torch.inference_mode():
            return self._model.head.logits(self._forward(plan, plan.logits_indices, on_layer))

    def _broadcast(self, plan: StepPlan, exported: Exported, copies: Copies, *, wants_logits: bool) -> None:
        if self._followers is None:
            return
        self._followers.broadcast(
            RankStep(
                copies=tuple(copies),
                forward=plan,
                logits_indices=plan.logits_indices,
                num_sampled=len(plan.sample_rows),
                is_whole=rows_needed_whole(plan.sampling),
                wants_logits=wants_logits,
                exported=tuple(exported),
            )
        )


class FollowingRunner(RankRunner):
    """The runner of a rank other than 0."""

    def __init__(self, model: LoadedModel, store: KVStore, *, num_threads: int, host: HostSlots | None) -> None:
        """`host` is the rank's part of the host tier, None without one."""
        super().__init__(model, store, num_threads=num_threads)
        self._host = host

    def follow(self, step: RankStep, on_layer: OnLayer | None = None) -> None:
        """Do this rank's part of a step. Raises RankLostError."""
        for copy in step.copies:
            self._copy(copy)
        if step.forward is None:
            self._barrier()
            return
        head = self._model.head
        with torch.inference_mode():
            hidden = self._forward(step.forward, step.logits_indices, on_layer)
            if step.wants_logits:
                head.logits(hidden)
                return
            if step.num_sampled:
                head.follow(hidden[: step.num_sampled], step.is_whole)
            if len(hidden) > step.num_sampled:
                head.follow_score(hidden[step.num_sampled :])

    def _copy(self, copy: BlockCopy) -> None:
        if copy.kind is CopyKind.FORK:
            self._store.copy_block(copy.group, copy.source, copy.target)
            return
        assert self._host is not None, "rank 0 has a host tier if it copies to one"
        if copy.kind is CopyKind.SAVE:
            self._host.save(copy.group, copy.source, copy.target)
        else:
            self._host.load(copy.group, copy.source, copy.target)
