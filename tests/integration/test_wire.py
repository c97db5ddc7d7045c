"""Channels over real sockets: authentication, limits, silence, reconnection."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve.cluster.base.errors import ChannelClosedError, ProtocolError
from pdserve.cluster.base.ids import RequestId
from pdserve.cluster.base.messages import Abort, Message
from pdserve.cluster.base.wire import Channel, ChannelClient, ChannelServer
from pdserve.cluster.base.worker_info import Endpoint
from support.services import CHANNEL, eventually


class Recorder:
    """Keeps what happens on channels."""

    def __init__(self) -> None:
        self.opened: list[Channel] = []
        self.messages: list[Message] = []
        self.closed: list[str] = []

    def channel_opened(self, channel: Channel) -> None:
        self.opened.append(channel)

    def message_received(self, channel: Channel, message: Message) -> None:
        self.messages.append(message)

    def channel_closed(self, channel: Channel, reason: str) -> None:
        self.closed.append(reason)


def abort(number: int) -> Abort:
    return Abort(request_id=RequestId("r"), attempt=number)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Recorder, ChannelServer, Endpoint]]:
    recorder = Recorder()
    server = ChannelServer(CHANNEL, recorder)
    endpoint = await server.start("127.0.0.1")
    yield recorder, server, endpoint
    await server.stop()


def make_client(endpoint: Endpoint, recorder: Recorder, token: bytes = b"secret") -> ChannelClient:
    async def resolve() -> Endpoint:
        return endpoint

    return ChannelClient(replace(CHANNEL, token=token), recorder, resolve, name="server")


async def test_messages_arrive_in_order_both_ways(served: tuple[Recorder, ChannelServer, Endpoint]) -> None:
    theirs, _, endpoint = served
    ours = Recorder()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: bool(ours.opened and theirs.opened), "both sides open")
    for number in range(50):
        ours.opened[0].post(abort(number))
        theirs.opened[0].post(abort(-number))
    await eventually(lambda: len(theirs.messages) == len(ours.messages) == 50, "all messages arrive")
    assert theirs.messages == [abort(number) for number in range(50)]
    assert ours.messages == [abort(-number) for number in range(50)]
    await client.stop()
    await eventually(lambda: theirs.closed == ["the peer closed the connection"], "the server sees the end")
    with pytest.raises(ChannelClosedError):
        ours.opened[0].post(abort(1))


async def test_a_wrong_token_is_refused_on_both_sides(served: tuple[Recorder, ChannelServer, Endpoint]) -> None:
    theirs, _, endpoint = served
    ours = Recorder()
    client = make_client(endpoint, ours, token=b"guess")
    client.start()
    await asyncio.sleep(0.2)
    assert not ours.opened
    assert not theirs.opened
    await client.stop()


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40, b"\x80\x04pickle" + b"x" * 40, b""])
async def test_strangers_are_cut_off(served: tuple[Recorder, ChannelServer, Endpoint], greeting: bytes) -> None:
    theirs, _, endpoint = served
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(greeting)
    if not greeting:
        writer.write_eof()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(reader.readexactly(200), 5)
    writer.close()
    assert not theirs.opened


async def test_a_frame_over_the_limit_closes_the_channel_before_it_is_read(
    served: tuple[Recorder, ChannelServer, Endpoint],
) -> None:
    theirs, _, endpoint = served
    ours = Recorder()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: bool(ours.opened), "open")
    ours.opened[0]._writer.write((1 << 31).to_bytes(4) + b"x")
    await eventually(lambda: bool(theirs.closed), "closed")
    assert "over the limit" in theirs.closed[0]
    await client.stop()


async def test_a_body_that_is_no_message_closes_the_channel(served: tuple[Recorder, ChannelServer, Endpoint]) -> None:
    theirs, _, endpoint = served
    ours = Recorder()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: bool(ours.opened), "open")
    ours.opened[0]._writer.write((3).to_bytes(4) + b"\xff\xff\xff")
    await eventually(lambda: bool(theirs.closed), "closed")
    assert "protocol error" in theirs.closed[0]
    await client.stop()


async def test_our_own_message_over_the_limit_is_an_error_here() -> None:
    recorder = Recorder()
    server = ChannelServer(replace(CHANNEL, max_frame_bytes=10), recorder)
    endpoint = await server.start("127.0.0.1")
    client = make_client(endpoint, Recorder())
    client.start()
    await eventually(lambda: bool(recorder.opened), "open")
    with pytest.raises(ProtocolError, match="over the frame limit"):
        recorder.opened[0].post(Abort(request_id=RequestId("r" * 100), attempt=1))
    await client.stop()
    await server.stop()


async def test_a_client_connects_again_after_the_channel_broke(
    served: tuple[Recorder, ChannelServer, Endpoint],
) -> None:
    theirs, _, endpoint = served
    ours = Recorder()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: bool(theirs.opened), "open")
    theirs.opened[0].close("test")
    await eventually(lambda: len(ours.opened) == 2, "open again")
    await client.stop()


async def test_a_silent_peer_is_given_up() -> None:
    """A peer that completes the handshake and then freezes: TCP alone would never say so."""
    recorder = Recorder()
    server = ChannelServer(replace(CHANNEL, heartbeat_s=0.05, silence_s=0.3), recorder)
    endpoint = await server.start("127.0.0.1")

    frozen = Recorder()
    client = ChannelClient(
        replace(CHANNEL, heartbeat_s=60.0, silence_s=120.0), frozen, lambda: _resolved(endpoint), name="server"
    )
    client.start()
    await eventually(lambda: bool(recorder.closed), "given up")
    assert recorder.closed[0] == "nothing heard for 0.3 s"
    await client.stop()
    await server.stop()


async def _resolved(endpoint: Endpoint) -> Endpoint:
    return endpoint


async def test_a_peer_that_reads_too_slowly_is_cut_off() -> None:
    recorder = Recorder()
    server = ChannelServer(replace(CHANNEL, max_buffer_bytes=100_000), recorder)
    endpoint = await server.start("127.0.0.1")
    ours = Recorder()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: bool(ours.opened and recorder.opened), "open")
    ours.opened[0]._reader._transport.pause_reading()  # type: ignore[attr-defined]
    message = Abort(request_id=RequestId("r" * 60_000), attempt=1)

    def post_much() -> None:
        for _ in range(2000):
            recorder.opened[0].post(message)

    with pytest.raises(ChannelClosedError, match="reads too slowly"):
        post_much()
    await client.stop()
    await server.stop()


async def test_a_handler_that_fails_ends_its_channel_and_not_the_reconnecting(
    served: tuple[Recorder, ChannelServer, Endpoint],
) -> None:
    theirs, _, endpoint = served

    class Failing(Recorder):
        def channel_opened(self, channel: Channel) -> None:
            super().channel_opened(channel)
            if len(self.opened) == 1:
                raise ChannelClosedError("posted to a connection that had just gone")
            if len(self.opened) == 2:
                raise RuntimeError("a fault of the handler")

    ours = Failing()
    client = make_client(endpoint, ours)
    client.start()
    await eventually(lambda: len(ours.opened) == 3, "connected for the third time")
    assert ours.closed == ["posted to a connection that had just gone", "a handler failed: RuntimeError"]
    ours.opened[2].post(abort(1))
    await eventually(lambda: theirs.messages == [abort(1)], "the third channel works")
    await client.stop()
