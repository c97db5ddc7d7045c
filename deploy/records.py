"""Records of running deployments, one private file each, so that status, down and the next up find them."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.cluster.base.environment import state_dir
from pdserve.cluster.base.errors import ConfigError
from pdserve.deploy.ray_head import RayHead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """What is needed to reach and to stop a deployment."""

    name: str
    ray_address: str
    head_pid: int
    head_create_time: float
    temp_dir: str
    url: str
    served_name: str
    token_hex: str
    """Authenticates channels."""
    ray_token: str
    """Authenticates to the deployment's Ray."""

    @property
    def head(self) -> RayHead:
        """The Ray head of the deployment."""
        return RayHead(pid=self.head_pid, create_time=self.head_create_time, temp_dir=Path(self.temp_dir))


class RecordStore:
    """The folder of records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, record: DeploymentRecord) -> None:
        """Write a record, readable by its owner only: it holds the deployment token."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(record.name)
        partial = path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(record), file)
        partial.rename(path)

    def load(self, name: str) -> DeploymentRecord | None:
        """Return the record of a deployment, or None."""
        try:
            fields = json.loads(self._path(name).read_text())
        except FileNotFoundError:
            return None
        try:
            return DeploymentRecord(**fields)
        except TypeError as error:
            raise ConfigError(
                f"{self._path(name)} was written by another version of pdserve: stop that deployment with it, "
                f"or end process {fields.get('head_pid')} and delete the file"
            ) from error

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the deployment's lock: two starts of one name would overwrite each other's record."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"deployment {name!r} is being started by another command") from error
            yield

    def names(self) -> list[str]:
        """Return the recorded deployments."""
        return sorted(path.stem for path in self._folder.glob("*.json")) if self._folder.exists() else []

    def remove(self, name: str) -> None:
        """Delete a record; fine if it is gone."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def running_record(name: str) -> DeploymentRecord:
    """Return the record of a running deployment; raises ConfigError if there is none."""
    records = RecordStore(state_dir())
    record = records.load(name)
    if record is None or not record.head.is_alive:
        known = ", ".join(records.names()) or "none"
        raise ConfigError(f"no deployment {name!r} is running here (recorded: {known})")
    return record


def refuse_running(name: str) -> None:
    """Raise ConfigError if the deployment runs already."""
    record = RecordStore(state_dir()).load(name)
    if record is not None and record.head.is_alive:
        raise ConfigError(
            f"deployment {name!r} is already running at {record.url}; `pdserve down --name {name}` stops it, "
            "--name and --port start another one beside it"
        )
