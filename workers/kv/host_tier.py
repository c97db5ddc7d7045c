"""A second level of the prefix cache in host memory: what the KV pool gives up can be copied back.

Every block that is published is copied here at once, under its name, so that giving it up later costs nothing: a
preempted sequence is swapped out the moment it is put back, as long as its copies are recent, and what it has computed
comes back by copies instead of computing, if these are quicker. Bounded; the least recently used copy goes first. Used
by the engine thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.workers.engine.rank_step import BlockCopy, CopyKind
from pdserve.workers.kv.store import KVStore

RATE_MEMORY = 0.9


class HostSlots:
    """The places of a rank's copies: as many slots per KV group as blocks may be kept."""

    def __init__(self, store: KVStore, num_slots: Sequence[int]) -> None:
        self._layers = [[store.layer(index) for index in group.layers] for group in store.layout.groups]
        self._slots = [
            torch.zeros((count, len(layers), *layers[0].shape[1:]), dtype=layers[0].dtype)
            for count, layers in zip(num_slots, self._layers, strict=True)
        ]

    def save(self, group: int, block: int, slot: int) -> None:
        """Copy a block's KV to a slot."""
        for place, layer in enumerate(self._layers[group]):
            self._slots[group][slot, place] = layer[block]

    def load(self, group: int, slot: int, block: int) -> None:
        """Copy a slot to a block."""
        for place, layer in enumerate(self._layers[group]):
            layer[block] = self._slots[group][slot, place]


class HostTier:
    """Copies of published blocks, one bounded set per KV group. Rank 0's: the other ranks copy what it copies.

    Attributes:
        num_loaded_blocks: copied back so far, over all groups.
        block_s: measured seconds to copy a block back, in the mean; 0 before the first.
        on_copy: learns of every copy, after it.
    """

    def __init__(
        self,
        store: KVStore,
        num_blocks: Sequence[int],
        clock: Clock,
    ) -> None:
        """`num_blocks` is one number per KV group."""
        self._slots = HostSlots(store, num_blocks)
        self._free = [list(range(count)) for count in num_blocks]
        self._slot_of: list[OrderedDict[PrefixHash, int]] = [OrderedDict() for _ in num_blocks]
        self._clock = clock
        self.num_loaded_blocks = 0
        self.block_s = 0.0
        self.on_copy: Callable[[BlockCopy], None] | None = None

    def holds(self, group: int, name: PrefixHash) -> bool:
        """True if a copy is here."""
        return name in self._slot_of[group]

    def save(self, group: int, block: int, name: PrefixHash) -> None:
        """Copy a block whose tokens all have their KV; it becomes the most recently used."""
        known = self._slot_of[group]
        if name in known:
            known.move_to_end(name)
            return
        if self._free[group]:
            slot = self._free[group].pop()
        elif known:
            _, slot = known.popitem(last=False)
        else:
            return
        self._slots.save(group, block, slot)
        self._note(CopyKind.SAVE, group, block, slot)
        known[name] = slot

    def load(self, group: int, names: Sequence[PrefixHash], blocks: Sequence[int]) -> None:
        """Copy what is held under `names` into blocks."""
        if not names:
            return
        start_time = self._clock.now()
        known = self._slot_of[group]
        for name, block in zip(names, blocks, strict=True):
            known.move_to_end(name)
            self._slots.load(group, known[name], block)
            self._note(CopyKind.LOAD, group, known[name], block)
        spent = (self._clock.now() - start_time) / len(names)
        self.block_s = spent if self.block_s == 0.0 else RATE_MEMORY * self.block_s + (1 - RATE_MEMORY) * spent
        self.num_loaded_blocks += len(names)

    def _note(self, kind: CopyKind, group: int, source: int, target: int) -> None:
        if self.on_copy is not None:
            self.on_copy(BlockCopy(kind=kind, group=group, source=source, target=target))
