"""Real transports that a test can kill while they carry something."""

from typing import Any

from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.transports.factory import Transports
from pdserve.kvtransfer.transports.protocol import SendTransport


class _FragileSender:
    """A real sender whose `send` fails once the transport was killed. See SendTransport."""

    def __init__(self, inner: SendTransport, shared: "FragileTransports", name: str) -> None:
        self._inner = inner
        self._shared = shared
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, header: Chunk) -> None:
        """See SendTransport."""
        if self._name in self._shared.killed:
            raise BrokenPipeError(f"{self._name} was killed")
        self._inner.send(header)


class FragileTransports(Transports):
    """The real transports.

    Attributes:
        killed: names of those that were killed: their links break with the next chunk, and no other opens.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.killed: set[str] = set()

    def make_sender(self, name: str, key: str) -> SendTransport:
        """See Transports."""
        if name in self.killed:
            raise OSError(f"{name} was killed")
        return _FragileSender(super().make_sender(name, key), self, name)
