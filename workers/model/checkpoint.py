"""Reads checkpoints in the Hugging Face layout: one or more safetensors files, memory-mapped.

`Checkpoint` hands out tensors by name and computes the model digest. It owns the open files; `close` releases them.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pdserve.cluster.base.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DIGEST_STRIDE_BYTES = 256 << 10
DIGEST_SAMPLE_BYTES = 4 << 10


class Checkpoint:
    """The weights of one model folder."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._paths = _weight_files(folder)
        self._folder = folder
        self._file_of: dict[str, int] = {}
        self._files = []
        try:
            for number, path in enumerate(self._paths):
                opened = self._stack.enter_context(safe_open(str(path), framework="pt"))
                self._files.append(opened)
                self._file_of.update(dict.fromkeys(opened.keys(), number))
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise CheckpointError(f"{path}: not a safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in its stored dtype, backed by the file; raises CheckpointError if absent or misshapen."""
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        found: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{self._folder}: tensor {name} is {tuple(found.shape)}, config.json implies {shape}")
        if not found.is_floating_point():
            raise CheckpointError(
                f"{self._folder}: tensor {name} is {found.dtype}: quantised weights are not supported yet"
            )
        return found

    def digest(self) -> str:
        """Return a digest of the configuration, the tensor table and samples of every 256 KiB of weights.

        A re-training or another quantisation changes nearly every weight, so samples find it; reading every byte of a
        large model at each start would cost more than loading it.
        """
        state = hashlib.blake2b(digest_size=16)
        state.update(_canonical_config(self._folder / "config.json"))
        for path in self._paths:
            size = path.stat().st_size
            state.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                state.update(file.read(header_bytes))
                for offset in range(8 + header_bytes, size, DIGEST_STRIDE_BYTES):
                    file.seek(offset)
                    state.update(file.read(DIGEST_SAMPLE_BYTES))
        return state.hexdigest()

    def close(self) -> None:
        """Release the files; tensors handed out stay valid as long as they are referenced."""
        self._stack.close()


def _canonical_config(path: Path) -> bytes:
    return json.dumps(json.loads(path.read_text()), sort_keys=True).encode()


def weight_names(folder: Path) -> list[str]:
    """Return the files of a folder that hold the weights, whether they are there or not. Raises CheckpointError."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a weight index: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name} lies outside the folder")
    return names


def _weight_files(folder: Path) -> list[Path]:
    paths = [folder / name for name in weight_names(folder)]
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{path} is missing (safetensors weights are needed)")
    return paths
