"""The TCPStore over which the members of a process group find each other: a pair of link ends, or a worker's ranks.

Nothing that comes over a store is unpickled. It is not authenticated: it holds addresses, under keys that only the
members know.
"""

import socket
import threading
from datetime import timedelta
from typing import Any

import torch

MEET_S = 5.0
"""How long two ends may take to find each other."""


class TorchStore:
    """The TCPStore over which process groups of this process meet, made when the first one needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: Any = None
        self.port = 0

    def get(self, host: str) -> Any:
        """Return the store, which listens on `host`. Raises OSError."""
        with self._lock:
            if self._store is None:
                self._store = self._make(host)
            return self._store

    def close(self) -> None:
        """Stop listening; links have ended before."""
        with self._lock:
            self._store = None

    def _make(self, host: str) -> Any:
        torch_distributed()  # before anything is open
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port = listener.getsockname()[1]
        return open_store(host, self.port, listener.detach())


def torch_distributed() -> Any:
    """Return torch.distributed. Raises OSError where this build has no Gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise OSError("torch.distributed has no Gloo here")
    return torch.distributed


def open_store(host: str, port: int, listen_fd: int | None = None) -> Any:
    """Return the store at a port, or one that listens on an open socket. Raises OSError."""
    kind = torch_distributed().TCPStore
    try:
        return kind(
            host,
            port,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=MEET_S),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
            use_libuv=False,
        )
    except RuntimeError as error:
        raise OSError(f"no TCPStore at port {port}: {error}") from error


def own_address(host: str, port: int) -> str:
    """Return the address of this machine that reaches a port elsewhere. Raises OSError if nobody listens there."""
    with socket.create_connection((host, port), MEET_S) as probe:
        address: str = probe.getsockname()[0]
    return address
