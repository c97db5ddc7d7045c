"""What stays quick to import: a command's answer, and a controller's return, must not wait for model libraries."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["pdserve.deploy.cli", "pdserve.deploy.running", "pdserve.deploy.creation", "pdserve.cluster.control.controller"],
)
def test_control_loads_no_model_library(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('torch', 'numba', 'transformers') if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout == "[]\n"
