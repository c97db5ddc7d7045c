"""How late a request's first token may be: what its headers say, else the configuration. Pure."""

import math
from collections.abc import Mapping

from pdserve.cluster.base.config import AdmissionConfig
from pdserve.cluster.base.errors import InvalidRequestError

LIMIT_HEADER = "x-slo-ttft-ms"
CLASS_HEADER = "x-slo-class"


def ttft_limit_s(headers: Mapping[str, str], settings: AdmissionConfig) -> float | None:
    """Return the limit in seconds; None if there is none. Raises InvalidRequestError that names the header."""
    text = headers.get(LIMIT_HEADER)
    if text is not None:
        return _milliseconds(text) / 1000
    name = headers.get(CLASS_HEADER)
    if name is None:
        return settings.ttft_limit_s
    limit_s = settings.classes.get(name)
    if limit_s is None:
        known = ", ".join(settings.classes) or "none"
        raise InvalidRequestError(
            f"{CLASS_HEADER}: {name!r} is no class of this deployment; known: {known}", param=CLASS_HEADER
        )
    return limit_s


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise InvalidRequestError(
            f"{LIMIT_HEADER} must be a number of milliseconds above 0, not {text!r}", param=LIMIT_HEADER
        )
    return value
