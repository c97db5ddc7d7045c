"""What every section of the configuration is: frozen, documented by its docstrings, closed against unknown keys."""

from pydantic import BaseModel, ConfigDict

Tree = dict[str, "Tree | list[Tree] | str | int | float | bool | None"]
"""A part of a configuration as YAML has it."""


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
