"""Messages to bytes and back: msgpack arrays, checked field by field, never pickle.

A frame body is `[protocol version, message code, field values in declaration order]`. Coders are compiled once from
the type hints of each dataclass; decoding refuses a wrong type, a wrong field count or an unknown code.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache

import msgpack

from pdserve.cluster.base.errors import ProtocolError
from pdserve.cluster.base.messages import MESSAGE_TYPES, Message

PROTOCOL_VERSION = 3
MAX_INT_BITS = 64

Wire = None | bool | int | float | str | bytes | list["Wire"]
Coder = Callable[[typing.Any], typing.Any]  # msgpack values have no narrower common type


def _identity(value: typing.Any) -> typing.Any:
    return value


def _refuse(expected: str, value: object) -> ProtocolError:
    return ProtocolError(f"expected {expected}, got {type(value).__name__}")


def _scalar_decoder(kind: type) -> Coder:
    def decode(value: object) -> object:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise _refuse(kind.__name__, value)
        return value

    return decode


def _coders(hint: typing.Any) -> tuple[Coder, Coder]:
    """Return (encode, decode) for a type hint."""
    origin = typing.get_origin(hint)
    if hasattr(hint, "__supertype__"):
        return _coders(hint.__supertype__)
    if hint in (int, float, bool, str, bytes):
        return _identity, _scalar_decoder(hint)
    if origin is tuple:
        return _tuple_coders(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return _optional_coders(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_coders(hint)
    if is_dataclass(hint):
        return _record_coders(typing.cast(type, hint))
    raise TypeError(f"no coder for {hint!r}")


def _tuple_coders(element: typing.Any) -> tuple[Coder, Coder]:
    encode, decode = _coders(element)
    if element is int:

        def decode_ints(value: object) -> tuple[int, ...]:
            if type(value) is not list or any(type(item) is not int for item in value):
                raise _refuse("a list of int", value)
            return tuple(value)

        return list, decode_ints

    def encode_items(value: typing.Any) -> list[Wire]:
        return [encode(item) for item in value]

    def decode_items(value: object) -> tuple[object, ...]:
        if type(value) is not list:
            raise _refuse("a list", value)
        return tuple(decode(item) for item in value)

    return encode_items, decode_items


def _optional_coders(hint: typing.Any) -> tuple[Coder, Coder]:
    inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    if len(inner) != 1:
        return _union_coders(hint)
    encode, decode = _coders(inner[0])
    return (lambda value: None if value is None else encode(value)), (
        lambda value: None if value is None else decode(value)
    )


def _union_coders(hint: typing.Any) -> tuple[Coder, Coder]:
    """A value of several records: its place in the union, then its fields."""
    kinds = typing.get_args(hint)
    if not all(is_dataclass(kind) for kind in kinds):
        raise TypeError(f"no coder for {hint!r}")
    coders = [_record_coders(typing.cast(type, kind)) for kind in kinds]
    places = {kind: place for place, kind in enumerate(kinds)}

    def encode(value: object) -> list[Wire]:
        place = places[type(value)]
        return [place, coders[place][0](value)]

    def decode(value: object) -> object:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not int or not 0 <= value[0] < len(coders):
            raise _refuse(f"one of {len(coders)} records", value)
        return coders[value[0]][1](value[1])

    return encode, decode


def _enum_coders(kind: type[Enum]) -> tuple[Coder, Coder]:
    def decode(value: object) -> Enum:
        try:
            return kind(value)
        except ValueError as error:
            raise ProtocolError(f"{value!r} is no {kind.__name__}") from error

    return (lambda member: member.value), decode


def _record_coders(kind: type) -> tuple[Coder, Coder]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    coders = [_coders(hints[name]) for name in names]
    encoders = [(name, encode) for name, (encode, _) in zip(names, coders, strict=True)]
    decoders = [(name, decode) for name, (_, decode) in zip(names, coders, strict=True)]

    def encode_record(record: object) -> list[Wire]:
        return [encode(getattr(record, name)) for name, encode in encoders]

    def decode_record(value: object) -> object:
        if type(value) is not list or len(value) != len(decoders):
            raise _refuse(f"{len(decoders)} fields of {kind.__name__}", value)
        try:
            return kind(**{name: decode(item) for (name, decode), item in zip(decoders, value, strict=True)})
        except ProtocolError as error:
            raise ProtocolError(f"{kind.__name__}: {error}") from error

    return encode_record, decode_record


@cache
def _message_coders() -> tuple[list[Coder], list[Coder]]:
    """Return the encoders and decoders of all messages; compiled once a process."""
    coders = [_record_coders(kind) for kind in MESSAGE_TYPES]
    return [encode for encode, _ in coders], [decode for _, decode in coders]


class Codec:
    """Encodes and decodes the messages of one protocol version."""

    def __init__(self) -> None:
        self._codes = {kind: code for code, kind in enumerate(MESSAGE_TYPES)}
        self._encoders, self._decoders = _message_coders()

    def encode(self, message: Message) -> bytes:
        """Return the frame body of a message."""
        code = self._codes[type(message)]
        body: bytes = msgpack.packb([PROTOCOL_VERSION, code, self._encoders[code](message)])
        return body

    def decode(self, body: bytes) -> Message:
        """Return the message of a frame body; raises ProtocolError on anything unexpected."""
        try:
            parts = msgpack.unpackb(body, max_ext_len=0)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"not a frame: {error}") from error
        if type(parts) is not list or len(parts) != 3:
            raise ProtocolError("a frame is [version, code, fields]")
        version, code, values = parts
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version!r}, this side speaks {PROTOCOL_VERSION}")
        if type(code) is not int or not 0 <= code < len(self._decoders):
            raise ProtocolError(f"unknown message code {code!r}")
        message: Message = self._decoders[code](values)
        return message
