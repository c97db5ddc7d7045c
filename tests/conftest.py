"""Fixtures shared by all tests."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.cluster.base.engine_config import LinearKind
from pdserve.cluster.base.environment import cache_dir
from pdserve.workers.assembly import AssembledEngine
from pdserve.workers.model.source import prepare_model
from support.checkpoints import FAMILIES, save_checkpoint
from support.engines import make_engine

# Before Triton's kernels are defined: there is no GPU to compile them for.
os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The long mode of the fault schedules."""
    parser.addoption("--fault-schedules", type=int, default=2000, help="fault schedules to run")
    parser.addoption("--fault-seed", type=int, default=None, help="the one fault schedule to run")


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny checkpoint per family; llama's is sharded."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(root / family, family, shards=family == "llama") for family in FAMILIES}


@pytest.fixture(scope="session")
def shared_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the tiny checkpoint of a family whose heads 4 ranks can share."""
    root = tmp_path_factory.mktemp("shared")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else save_checkpoint(path, family, is_shared=True)

    return folder


@pytest.fixture(scope="session")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gemma3 checkpoint with odd widths."""
    return save_checkpoint(tmp_path_factory.mktemp("odd") / "gemma3", "gemma3", odd=True)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The converted demo model, from the cache."""
    return prepare_model("demo", cache_dir(), lambda stage, share: None)


@pytest.fixture(scope="session")
def demo_models(demo_folder: Path) -> Callable[[LinearKind], AssembledEngine]:
    """Loads the demo model with a kind of weights, once; see bits.plain_engine for engines of one's own."""
    return functools.cache(lambda linear: make_engine(demo_folder, linear=linear, threads=2, kv_memory_gib=0.1))
