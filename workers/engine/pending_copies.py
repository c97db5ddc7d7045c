"""Copies of blocks that rank 0 has made and the other ranks are still to make, with or before the next step.

Until they have, both blocks keep what they hold: a free block can be bound to a transfer, whose bytes reach a rank on
another path than its steps. So both are pinned meanwhile.
"""

import numpy as np

from pdserve.workers.engine.block_pool import BlockPool
from pdserve.workers.engine.rank_step import BlockCopy, CopyKind


class PendingCopies:
    """Used by the engine thread only."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._noted: list[BlockCopy] = []
        self._given: list[BlockCopy] = []

    def __len__(self) -> int:
        """Copies noted and not given to the ranks."""
        return len(self._noted)

    def note(self, copy: BlockCopy) -> None:
        """A copy was made here; its blocks are in use."""
        for block in _blocks_of(copy):
            self._pool.pin(copy.group, np.array([block], np.int32))
        self._noted.append(copy)

    def take(self) -> tuple[BlockCopy, ...]:
        """Give the ranks what was noted; `made` follows."""
        given, self._noted = self._noted, []
        self._given = given
        return tuple(given)

    def made(self) -> None:
        """Every rank has made the copies that were given."""
        for copy in self._given:
            for block in _blocks_of(copy):
                self._pool.unpin(copy.group, np.array([block], np.int32))
        self._given = []


def _blocks_of(copy: BlockCopy) -> tuple[int, ...]:
    """Return the blocks of the pool among the two places."""
    match copy.kind:
        case CopyKind.FORK:
            return copy.source, copy.target
        case CopyKind.SAVE:
            return (copy.source,)
        case CopyKind.LOAD:
            return (copy.target,)
