"""What rank 0 tells the other ranks in each step: the plan without what only rank 0 needs.

It samples, so no rank needs a token before the next plan brings it: ranks cannot disagree about one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.transfer_messages import TransferId
from pdserve.workers.engine.plan import ForwardPlan, Int32


class CopyKind(IntEnum):
    """Between which places a block is copied."""

    FORK = 0
    """From a block of the pool to another one."""
    SAVE = 1
    """From a block of the pool to a slot of the host tier."""
    LOAD = 2
    """From a slot of the host tier to a block of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """A copy of a block's KV in all layers of a group."""

    kind: CopyKind
    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedStep:
    """What a step computes of a prefill whose KV goes to a sink."""

    pair_no: int
    """The sink's connection to this worker."""
    transfer: TransferId
    num_tokens: int
    """Of the whole prefill."""
    num_sink_tokens: int
    """Of these, the tokens that the sink holds."""
    send_from: int
    """The first token that no earlier step has announced."""
    end_token: int
    """One past the last token that has its KV after the step."""
    first_chunks: tuple[int, ...]
    """In each stream of the pair, the number of the next chunk."""
    blocks: tuple[Int32, ...]
    """The block table of each KV group, complete up to `end_token`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of a rank that follows."""

    copies: tuple[BlockCopy, ...]
    """Before anything else, in order."""
    forward: ForwardPlan | None
    """None if there is nothing to compute: the ranks meet when they have made the copies."""
    logits_indices: Int32
    """[S + Q] see StepPlan."""
    num_sampled: int
    """S"""
    is_whole: NDArray[np.bool_]
    """[S] rows whose logits rank 0 needs whole."""
    wants_logits: bool
    """All logits of all sampled rows, and no tokens: the self-test."""
    exported: tuple[ExportedStep, ...]


class Followers(Protocol):
    """The other ranks of rank 0."""

    def broadcast(self, step: RankStep) -> None:
        """Send a step to each of them; does not wait for them. Raises RankLostError."""


Exported = Sequence[ExportedStep]
Copies = Sequence[BlockCopy]
