"""Mutual proof that both ends of a connection hold the deployment token.

client → server   magic, client nonce
server → client   server nonce, HMAC(token, "server" | nonces)
client → server   HMAC(token, "client" | nonces)
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
from typing import Protocol

from pdserve.cluster.base.errors import ProtocolError

MAGIC = b"PDS1"
NONCE_BYTES = 32
MAC_BYTES = 32


class ByteStream(Protocol):
    """What a handshake needs of a connection."""

    async def read_exactly(self, count: int) -> bytes:
        """Return exactly `count` bytes. Raises asyncio.IncompleteReadError at the end of the stream."""

    async def write(self, data: bytes) -> None:
        """Send bytes."""


class SocketStream:
    """A non-blocking socket as a ByteStream."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    async def read_exactly(self, count: int) -> bytes:
        """See ByteStream."""
        data = b""
        while len(data) < count:
            part = await self._loop.sock_recv(self._socket, count - len(data))
            if not part:
                raise asyncio.IncompleteReadError(data, count)
            data += part
        return data

    async def write(self, data: bytes) -> None:
        """See ByteStream."""
        await self._loop.sock_sendall(self._socket, data)


def _mac(token: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.new(token, side + client_nonce + server_nonce, hashlib.sha256).digest()


async def greet_as_server(stream: ByteStream, token: bytes) -> None:
    """Prove and check the token. Raises ProtocolError if the peer does not hold it."""
    hello = await stream.read_exactly(len(MAGIC) + NONCE_BYTES)
    if hello[: len(MAGIC)] != MAGIC:
        raise ProtocolError("not a pdserve peer")
    client_nonce = hello[len(MAGIC) :]
    server_nonce = secrets.token_bytes(NONCE_BYTES)
    await stream.write(server_nonce + _mac(token, b"server", client_nonce, server_nonce))
    proof = await stream.read_exactly(MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(token, b"client", client_nonce, server_nonce)):
        raise ProtocolError("the peer does not hold the deployment token")


async def greet_as_client(stream: ByteStream, token: bytes) -> None:
    """Prove and check the token. Raises ProtocolError if the server does not hold it."""
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    await stream.write(MAGIC + client_nonce)
    answer = await stream.read_exactly(NONCE_BYTES + MAC_BYTES)
    server_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _mac(token, b"server", client_nonce, server_nonce)):
        raise ProtocolError("the server does not hold the deployment token")
    await stream.write(_mac(token, b"client", client_nonce, server_nonce))
