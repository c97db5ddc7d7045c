"""Downloads a checkpoint by its hub id, once a node: the files the engine reads, of one commit.

Files go to the hub library's own cache, where other tools find them; its environment variables (HF_HOME, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE) hold. What cannot be served is refused before the weights are fetched.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it has no types

from pdserve.cluster.base.errors import CheckpointError, first_line
from pdserve.workers.model.checkpoint import weight_names
from pdserve.workers.model.families import read_config
from pdserve.workers.model.gguf_import import Progress, locked

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
DESCRIPTION = ["*.json", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges*"]

Check = Callable[[Path], None]
"""Called with a folder without weights; raises if the model cannot be served."""

SUBFOLDERS = ["*/*"]


def is_hub_id(path: str) -> bool:
    """True if a model's path has the form of a hub id, `organisation/name`."""
    return HUB_ID.match(path) is not None


def accept_every_model(folder: Path) -> None:
    """Check nothing."""


def download(
    hub_id: str,
    revision: str | None,
    cache: Path,
    progress: Progress,
    check: Check = accept_every_model,
) -> Path:
    """Return the folder of a checkpoint at a revision (branch, tag or commit), fetched if it is not on this node.

    The folder is named after the commit. `check` is called when all but the weights is there, and raises if the model
    cannot be served. Raises CheckpointError.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"hub-{hub_id.replace('/', '--')}.lock"):
        described = _fetch(hub_id, revision, DESCRIPTION, f"downloading the description of {hub_id}", progress)
        if not (described / "config.json").is_file():
            raise CheckpointError(f"model.path {hub_id}: it has no config.json")
        read_config(described)
        check(described)
        names = weight_names(described)
        # The commit that was described: a branch may move meanwhile.
        folder = _fetch(hub_id, described.name, names, f"downloading the weights of {hub_id}", progress)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"model.path {hub_id}: it has no {missing[0]}")
    return folder


def _fetch(hub_id: str, revision: str | None, patterns: list[str], stage: str, progress: Progress) -> Path:
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=SUBFOLDERS,
            tqdm_class=progress_bar(stage, progress),
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model.path {hub_id}: neither a local folder nor cached, and the hub cannot be reached: "
            f"{first_line(error.__cause__ or error)}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"model.revision {revision}: {hub_id} has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model.path {hub_id}: neither a local folder nor a repository of the hub that can be read (HF_TOKEN)"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise CheckpointError(f"model.path {hub_id}: {first_line(error)}") from error
    return Path(folder)


def progress_bar(stage: str, progress: Progress) -> type[Any]:
    """Return a progress bar class that draws nothing, and reports the largest share of files seen."""

    largest = 0.0

    class Reporting(tqdm):  # type: ignore[misc]  # see the import
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": False, "file": _Nowhere()})

        def update(self, count: float | None = 1) -> None:
            nonlocal largest
            super().update(count)
            if self.total and self.n / self.total > largest:
                largest = min(1.0, self.n / self.total)
                progress(stage, largest)

    return Reporting


class _Nowhere:
    """A file that keeps nothing and is no terminal."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return

    def isatty(self) -> bool:
        return False
