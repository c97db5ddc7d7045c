"""The real actors of a worker's ranks, which do something bad once when they are told to."""

import os
import signal
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from pdserve.deploy.creation import WorkerCreator
from pdserve.workers import actors
from pdserve.workers.engine.plan import ForwardPlan


class Phase(StrEnum):
    """When it happens."""

    PREFILL = "prefill"
    """In the second step of a prompt: KV of the first is on its way."""
    DECODE = "decode"
    GATHER = "gather"
    """While KV is copied into a slot."""
    SCATTER = "scatter"
    """While KV is copied out of a slot."""


class Misdeed(StrEnum):
    """What happens."""

    KILL = "kill"
    STOP = "stop"
    """The process freezes."""
    HANG = "hang"
    """The thread that computes does not return."""
    RAISE = "raise"


class _Trap:
    """Springs once, in the process that was told to set it; notes when."""

    def __init__(self) -> None:
        self.phase: Phase | None = None
        self.misdeed = Misdeed.KILL
        self.note = Path()

    def pass_by(self, phase: Phase) -> None:
        if phase is not self.phase:
            return
        self.phase = None
        self.note.write_text(str(time.monotonic()))
        match self.misdeed:
            case Misdeed.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Misdeed.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Misdeed.HANG:
                time.sleep(3600)
            case Misdeed.RAISE:
                raise RuntimeError("the rank exploded")


def _lay(trap: _Trap) -> None:
    """Let the process pass by the trap wherever it computes or copies."""
    from pdserve.workers.kv.copy import BlockCopier
    from pdserve.workers.model.runner import RankRunner

    forward, gather, scatter = RankRunner._forward, BlockCopier.gather, BlockCopier.scatter

    def trapped_forward(self: Any, plan: ForwardPlan, *arguments: Any) -> Any:
        has_decodes_only = plan.num_tokens == plan.num_rows
        if has_decodes_only or plan.positions[0] > 0:
            trap.pass_by(Phase.DECODE if has_decodes_only else Phase.PREFILL)
        return forward(self, plan, *arguments)

    def trapped_gather(self: Any, *arguments: Any) -> Any:
        trap.pass_by(Phase.GATHER)
        return gather(self, *arguments)

    def trapped_scatter(self: Any, *arguments: Any) -> Any:
        trap.pass_by(Phase.SCATTER)
        return scatter(self, *arguments)

    RankRunner._forward = trapped_forward  # type: ignore[method-assign]
    BlockCopier.gather = trapped_gather  # type: ignore[method-assign]
    BlockCopier.scatter = trapped_scatter  # type: ignore[method-assign]


class _Trapped:
    def __init__(self, *arguments: Any) -> None:
        self._trap = _Trap()
        _lay(self._trap)
        super().__init__(*arguments)

    async def set_trap(self, phase: Phase, misdeed: Misdeed, note: str) -> None:
        """Do `misdeed` the next time that this rank is in that phase."""
        self._trap.misdeed, self._trap.note = misdeed, Path(note)
        self._trap.phase = phase

    async def pid(self) -> int:
        """Return the process."""
        return os.getpid()


class TrappedWorker(_Trapped, actors.WorkerActor):
    """See WorkerActor."""


class TrappedRank(_Trapped, actors.RankActor):
    """See RankActor."""


def trapped_creator(**arguments: Any) -> WorkerCreator:
    """Return a creator of ranks that can be told to do something bad."""
    return WorkerCreator(worker_actor=TrappedWorker, rank_actor=TrappedRank, **arguments)
