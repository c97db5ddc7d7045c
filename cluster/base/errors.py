"""The error tree of pdserve.

PdserveError
├── ClientError             the caller's fault; never retried
│   ├── InvalidRequestError     a field of a request is wrong (names it)
│   ├── ConfigError             a configuration is wrong or impossible (names the key)
│   └── CheckpointError         a model folder or file cannot be used
├── RetryableError          infrastructure trouble; another try or another worker may succeed
│   ├── OverloadedError         a bounded queue is full
│   ├── NoWorkerError           no worker can take the request now
│   ├── WorkerLostError         the worker died or went silent while it held the request
│   ├── RankLostError           a rank of the worker died, failed or hangs: the worker ends
│   ├── TokenTimeoutError       the worker lives, but no token came in time
│   └── ChannelClosedError      the channel to a peer ended
└── InternalError           our fault
    ├── EngineError             the engine failed while it ran the request
    └── ProtocolError           a peer sent what the protocol does not allow
"""

from pdserve.cluster.base.ids import WorkerId


class PdserveError(Exception):
    """Root of every error raised on purpose by pdserve."""


class ClientError(PdserveError):
    """The caller asked for something that cannot be done."""


class InvalidRequestError(ClientError):
    """A request field is wrong. `param` names the field, `code` is machine readable."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class ConfigError(ClientError):
    """A configuration key is unknown, out of range or impossible together with others."""


class CheckpointError(ClientError):
    """A model folder or file cannot be used; the message says which part."""


class RetryableError(PdserveError):
    """Infrastructure trouble that another attempt may not meet."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryableError):
    """A bounded queue is full."""


class NoWorkerError(RetryableError):
    """No worker can take the request now."""


class WorkerLostError(RetryableError):
    """The worker died or went silent while it held the request. `worker_id` names it where it is known."""

    worker_id: WorkerId | None = None


class RankLostError(RetryableError):
    """A tensor-parallel rank of this worker died, failed or hangs; the whole worker ends with it."""


class TokenTimeoutError(RetryableError):
    """The worker lives, but no token of the request came within ingress.token_timeout_s."""


class ChannelClosedError(RetryableError):
    """The channel to a peer ended; the message says why."""


class InternalError(PdserveError):
    """Our fault."""


class EngineError(InternalError):
    """The engine failed while it ran the request."""


class ProtocolError(InternalError):
    """A peer sent a frame that the protocol does not allow."""


def first_line(error: BaseException) -> str:
    """Return what an error says in one line; its type if it says nothing, as MemoryError and TimeoutError do."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
