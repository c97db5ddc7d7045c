"""Kinds of weights and KV, as benchmarks name them: engine.linear, or engine.linear+engine.kv_dtype."""

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.kv_layout import KVDtype


def parse_kind(text: str) -> tuple[LinearKind, KVDtype]:
    """Return weights and KV of a kind, `fp16` or `fp16+int8`. Raises ValueError."""
    linear, _, kv_dtype = text.partition("+")
    return LinearKind(linear), KVDtype(kv_dtype or KVDtype.FLOAT32)
