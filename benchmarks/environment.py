"""Says on what a benchmark ran: commit, hardware, versions. No host names, no paths."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil
import torch


def describe_environment() -> dict[str, str | int]:
    """Return commit, processor, instruction set, memory and library versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": psutil.cpu_count() or 0,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numba")},
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
