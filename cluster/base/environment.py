"""Environment variables, and what follows from them: folders, the Ray token, the environment of child processes.

The only file of pdserve that reads them.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def state_dir() -> Path:
    """Where running deployments are recorded (XDG_STATE_HOME; PDSERVE_STATE_DIR overrides)."""
    override = os.environ.get("PDSERVE_STATE_DIR")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pdserve"


def cache_dir() -> Path:
    """Where converted checkpoints are kept (XDG_CACHE_HOME; PDSERVE_CACHE_DIR overrides)."""
    override = os.environ.get("PDSERVE_CACHE_DIR")
    if override:
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def ray_authentication(token: str) -> dict[str, str]:
    """Return the environment in which Ray asks for, and sends, a deployment's token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def authenticate_to_ray(token: str) -> None:
    """Let this process send a deployment's token; to be called before it connects."""
    os.environ.update(ray_authentication(token))


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a Ray head of ours: the present one without foreign Ray settings, plus `extra`."""
    foreign = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK")
    kept = {key: value for key, value in os.environ.items() if key not in foreign and not key.startswith("RAY_SERVE_")}
    return {**kept, **extra}
