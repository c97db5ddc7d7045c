"""Steps from rank 0's engine thread to the thread of another rank, on a connection of their own.

One write a rank: it needs no agreement about lengths, and does not stand in line with the collectives. What a broadcast
of the process group takes instead is measured by benchmarks/gang.py.
"""

import socket

from pdserve.cluster.base.errors import ProtocolError, RankLostError
from pdserve.workers.engine.rank_step import RankStep
from pdserve.workers.gang.step_codec import decode_step, encode_step

LENGTH_BYTES = 4
MAX_STEP_BYTES = 256 << 20


class StepSender:
    """Rank 0's end. See Followers; used by one thread at a time."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        """`connections` are blocking ones, by rank."""
        self._connections = connections

    def broadcast(self, step: RankStep) -> None:
        """See Followers."""
        body = encode_step(step)
        if len(body) > MAX_STEP_BYTES:
            raise ProtocolError(f"a step of {len(body)} bytes")
        frame = len(body).to_bytes(LENGTH_BYTES) + body
        for rank, connection in self._connections.items():
            try:
                connection.sendall(frame)
            except OSError as error:
                raise RankLostError(f"rank {rank} takes no steps: {error}") from error

    def close(self) -> None:
        """Break the connections: the others' `receive` returns None."""
        for connection in self._connections.values():
            connection.close()


class StepReceiver:
    """The end of another rank."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection` is a blocking one."""
        self._connection = connection

    def receive(self) -> RankStep | None:
        """Wait for the next step; None if rank 0 has closed. Raises OSError or ProtocolError."""
        head = self._read(LENGTH_BYTES)
        if head is None:
            return None
        size = int.from_bytes(head)
        if not 0 < size <= MAX_STEP_BYTES:
            raise ProtocolError(f"a step of {size} bytes")
        body = self._read(size)
        return None if body is None else decode_step(bytes(body))

    def close(self) -> None:
        """Break the connection, also while another thread receives."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end was quicker.
            return

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return data
