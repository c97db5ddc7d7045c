"""The real worker actor, on a wire that damages chunks and on transports that can be killed."""

from typing import Any

from pdserve.cluster.base.transfer_messages import Chunk
from pdserve.kvtransfer.transports.factory import Transports
from pdserve.kvtransfer.transports.protocol import SendTransport
from pdserve.workers import hosting, worker
from pdserve.workers.actors import WorkerActor
from support.runners import DamagingCopier

DAMAGED_SHARE = 0.02


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
    """The real transports, until one is killed."""

    killed: set[str] = set()  # noqa: RUF012 — one worker a process

    def make_sender(self, name: str, key: str) -> SendTransport:
        """See Transports."""
        if name in self.killed:
            raise OSError(f"{name} was killed")
        return _FragileSender(super().make_sender(name, key), self, name)


class FaultyWorkerActor(WorkerActor):
    """See WorkerActor."""

    def __init__(self, *arguments: Any) -> None:
        worker.Transports = FragileTransports  # type: ignore[misc]
        hosting.BlockCopier = lambda store: DamagingCopier(store, share=DAMAGED_SHARE)  # type: ignore[misc,assignment]
        super().__init__(*arguments)

    async def kill_transport(self, name: str) -> None:
        """Links over it break with their next chunk, and no other opens."""
        FragileTransports.killed.add(name)

    async def state(self) -> tuple[bool, str]:
        """Return whether nothing is held (LEAK check), and the metrics."""
        served = self._worker
        assert isinstance(served, worker.Worker)
        load = served.load()
        is_clean = (
            served.num_live == 0
            and (load.num_running, load.num_waiting, load.num_queued_prompt_tokens) == (0, 0, 0)
            and served._engine.pool.is_all_free
            and served.has_idle_handoff
        )
        return is_clean, served.metrics_text()
