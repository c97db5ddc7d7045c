"""Errors as HTTP statuses and OpenAI bodies. Pure."""

import math

from pdserve.cluster.base.errors import InvalidRequestError, OverloadedError, PdserveError, RetryableError
from pdserve.router.answers import error_body
from pdserve.router.json_types import Json


def describe_error(error: Exception) -> tuple[int, Json, dict[str, str]]:
    """Return (status, body, headers) of an error."""
    if isinstance(error, InvalidRequestError):
        body = error_body(error.message, "invalid_request_error", param=error.param, code=error.code)
        return error.status, body, {}
    if isinstance(error, RetryableError):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        if isinstance(error, OverloadedError):
            return 429, error_body(str(error), "rate_limit_error", code="overloaded"), headers
        return 503, error_body(str(error), "service_unavailable", code="unavailable"), headers
    if isinstance(error, PdserveError):
        return 500, error_body(str(error), "server_error", code="internal_error"), {}
    return 500, error_body(f"internal error: {type(error).__name__}", "server_error", code="internal_error"), {}
