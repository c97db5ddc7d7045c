"""Plain memory for the slots of a link, each made when it is first used."""

import mmap


class SlotBuffers:
    """Anonymous memory, one piece a slot."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._views: dict[int, memoryview] = {}

    def view(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        if slot not in self._views:
            self._views[slot] = memoryview(mmap.mmap(-1, self._slot_bytes))
        return self._views[slot]

    def trim(self, num_slots: int) -> None:
        """Give back the memory of slots from `num_slots` on."""
        for slot in [slot for slot in self._views if slot >= num_slots]:
            del self._views[slot]
