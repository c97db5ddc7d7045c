"""What a transport offers its link, one end each. A transport moves bytes and knows nothing of transfers."""

from collections.abc import Callable
from typing import Protocol

from pdserve.cluster.base.transfer_messages import Chunk


class SendTransport(Protocol):
    """The source's end. `buffer` and `send` are called by the link's sender thread, one at a time."""

    carries_headers: bool
    """False: the owner posts each header on the control channel once `send` has returned."""

    @property
    def address(self) -> str:
        """What the sink needs to attach."""

    async def wait_attached(self, answer: str) -> None:
        """Return when the sink has attached; `answer` is what its end said. Raises OSError or ProtocolError."""

    def buffer(self, slot: int) -> memoryview:
        """Return the bytes of a slot, to gather into."""

    def send(self, header: Chunk) -> None:
        """Send the bytes of the header's slot, and the header where it travels with them (`carries_headers`).

        May block, and may return before the bytes have left. Raises OSError if the link is broken.
        """

    def progress(self) -> float | None:
        """Drive what is under way; return in how many seconds to call again, None if nothing is.

        Called by the sender thread while it has nothing to send. Raises OSError if the link is broken.
        """

    def trim(self, num_slots: int) -> None:
        """Give back the memory of slots from `num_slots` on; they hold nothing."""

    def close(self) -> None:
        """Break the link: `send` fails from now on, also one that blocks. Callable from any thread, twice too."""

    def free(self) -> None:
        """Return the memory; called by the sender thread as its last act, after `close`."""


class ReceiveTransport(Protocol):
    """The sink's end."""

    answer: str
    """What the source's end needs to know once this one has attached."""

    async def attach(self) -> None:
        """Connect to the source. Raises OSError or ProtocolError."""

    def header_received(self, header: Chunk) -> None:
        """A header came over the control channel. Raises ProtocolError where headers travel with their bytes."""

    def body(self, slot: int, num_bytes: int) -> memoryview:
        """Return the landed bytes of a slot; valid until the slot is credited."""

    def close(self) -> None:
        """Break the link: nothing that lands is announced any more; bodies stay valid until `free`."""

    async def free(self) -> None:
        """Return the memory. Nobody may use a body any more (the link is fenced). May be called twice."""


OnChunk = Callable[[Chunk], None]
"""A chunk has landed; called on the transport's own thread."""
OnBroken = Callable[[str], None]
"""The link broke; called on the transport's own thread."""
