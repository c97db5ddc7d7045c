"""A second level of the prefix cache in host memory: what the KV pool gives up can be copied back.

Every block that is published is copied here at once, under its name, so that giving it up later costs nothing: a
preempted sequence is swapped out the moment it is put back, as long as its copies are recent, and what it has computed
comes back by copies instead of computing, if these are quicker. Bounded; the least recently used copy goes first. Used
by the engine thread only.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.workers.kv.store import KVStore

RATE_MEMORY = 0.9


class HostTier:
    """Copies of published blocks, one bounded set per KV group.

    Attributes:
        num_loaded_blocks: copied back so far, over all groups.
        block_s: measured seconds to copy a block back, in the mean; 0 before the first.
    """

    def __init__(self, store: KVStore, num_blocks: Sequence[int], clock: Clock) -> None:
        """`num_blocks` is one number per KV group."""
        self._layers = [[store.layer(index) for index in group.layers] for group in store.layout.groups]
        self._slots = [
            torch.zeros((count, len(layers), *layers[0].shape[1:]), dtype=layers[0].dtype)
            for count, layers in zip(num_blocks, self._layers, strict=True)
        ]
        self._free = [list(range(count)) for count in num_blocks]
        self._slot_of: list[OrderedDict[PrefixHash, int]] = [OrderedDict() for _ in num_blocks]
        self._clock = clock
        self.num_loaded_blocks = 0
        self.block_s = 0.0

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
        for place, layer in enumerate(self._layers[group]):
            self._slots[group][slot, place] = layer[block]
        known[name] = slot

    def load(self, group: int, names: Sequence[PrefixHash], blocks: Sequence[int]) -> None:
        """Copy what is held under `names` into blocks."""
        if not names:
            return
        start_time = self._clock.now()
        known = self._slot_of[group]
        for name, block in zip(names, blocks, strict=True):
            known.move_to_end(name)
            for place, layer in enumerate(self._layers[group]):
                layer[block] = self._slots[group][known[name], place]
        spent = (self._clock.now() - start_time) / len(names)
        self.block_s = spent if self.block_s == 0.0 else RATE_MEMORY * self.block_s + (1 - RATE_MEMORY) * spent
        self.num_loaded_blocks += len(names)
