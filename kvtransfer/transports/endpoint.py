"""Where a source listens for a link, as text: host, port and a key that says which link."""

from pdserve.cluster.base.errors import ProtocolError

_SEPARATOR = "|"


def format_endpoint(host: str, port: int, key: str) -> str:
    """Return the text."""
    return _SEPARATOR.join((host, str(port), key))


def parse_endpoint(kind: str, address: str) -> tuple[str, int, str]:
    """Return host, port and key. Raises ProtocolError for anything else; `kind` names the transport."""
    try:
        host, port_text, key = address.split(_SEPARATOR)
        port = int(port_text)
    except ValueError as error:
        raise ProtocolError(f"{kind} address {address!r} is malformed") from error
    if not 0 < port < 1 << 16:
        raise ProtocolError(f"{kind} address {address!r} has no such port")
    return host, port, key
