"""What the machine has: memory that a new process may take, and GPUs."""

from pathlib import Path

import psutil
import torch


def num_gpus() -> int:
    """Return how many CUDA devices this process sees."""
    count: int = torch.cuda.device_count()
    return count


def available_memory_bytes() -> int:
    """Return the memory a new process may take: the machine's, or the control group's if that is less."""
    available: int = psutil.virtual_memory().available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        available = min(available, limit - used + _cgroup_file_bytes())
    return available


def _cgroup_file_bytes() -> int:
    """Page cache counted in memory.current; the kernel gives it back under pressure."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _cgroup_bytes(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
