"""The type of JSON bodies."""

from collections.abc import Sequence

Json = dict[str, "Json | Sequence[Json | str | int | float | None] | str | int | float | None"]
