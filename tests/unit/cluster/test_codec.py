"""The codec: every message survives the wire, anything else is refused."""

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.base.codec import Codec
from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.messages import MESSAGE_TYPES, Abort, Generate, Heartbeat, Message, Register, Tokens, View
from pdserve.cluster.base.request import FinishReason, Request, SamplingParams, TokenDelta
from pdserve.cluster.base.worker_info import WorkerLoad
from support.workers import make_info, make_view

CODEC = Codec()
REQUEST = Request(
    request_id=RequestId("r"),
    attempt=1,
    prompt_token_ids=(1, 2, 3),
    resume_token_ids=(4,),
    sampling=SamplingParams(max_tokens=5, temperature=0.5, seed=2**64 - 1, stop_token_ids=(7,)),
)
DELTA = TokenDelta(request_id=RequestId("r"), attempt=1, index=4, token_ids=(9,), finish_reason=FinishReason.STOP)
EXAMPLES: list[Message] = [
    Heartbeat(),
    Generate(request=REQUEST),
    Tokens(deltas=(DELTA, dataclasses.replace(DELTA, finish_reason=None))),
    Register(info=make_info(WorkerId("w")), load=WorkerLoad(num_running=3, predicted_step_s=0.25)),
    View(sequence_no=3, workers=(make_view("w"),)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert CODEC.decode(CODEC.encode(message)) == message


def test_whole_numbers_are_taken_for_floats_but_not_the_other_way_round() -> None:
    body = msgpack.unpackb(CODEC.encode(Generate(request=REQUEST)))
    place = [field.name for field in dataclasses.fields(REQUEST)].index("sampling")
    body[2][0][place][1] = 1
    decoded = CODEC.decode(msgpack.packb(body))
    assert isinstance(decoded, Generate)
    assert decoded.request.sampling.temperature == 1.0
    body[2][0][1] = 1.0
    with pytest.raises(ProtocolError, match="expected int, got float"):
        CODEC.decode(msgpack.packb(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([2, 2]),
        msgpack.packb([1, 0, []]),
        msgpack.packb([2, len(MESSAGE_TYPES), []]),
        msgpack.packb([2, -1, []]),
        msgpack.packb([2, True, []]),
        msgpack.packb([2, 2, ["r"]]),
        msgpack.packb([2, 2, ["r", 1, 2]]),
        msgpack.packb([2, 2, [5, 1]]),
        msgpack.packb([2, 2, {"request_id": "r", "attempt": 1}]),
        msgpack.packb([2, 4, [[["r", 0, 0, 0, [1], "sideways", None, 0]]]]),
        msgpack.packb([2, 4, [[["r", 0, 0, 0, [1.5], None, None, 0]]]]),
        msgpack.packb([2, 4, [[["r", 0, 0, 0, [True], None, None, 0]]]]),
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        CODEC.decode(body)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(body: bytes) -> None:
    try:
        CODEC.decode(body)
    except ProtocolError:
        return


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_decodes_to_a_message(place: int, value: int) -> None:
    body = bytearray(CODEC.encode(EXAMPLES[3]))
    body[place % len(body)] = value
    try:
        assert isinstance(CODEC.decode(bytes(body)), MESSAGE_TYPES)
    except ProtocolError:
        return


def test_every_message_type_has_its_own_code() -> None:
    assert len(set(MESSAGE_TYPES)) == len(MESSAGE_TYPES)
    assert CODEC.decode(CODEC.encode(Abort(request_id=RequestId("x"), attempt=2))) == Abort(
        request_id=RequestId("x"), attempt=2
    )
