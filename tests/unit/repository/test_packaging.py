"""The repository guards itself: packages, wheel, imports, documents."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "cluster", "deploy", "kvtransfer", "router", "workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def packages_on_disk() -> set[str]:
    inits = [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    return {".".join(("pdserve", *path.parent.relative_to(ROOT).parts)) for path in inits}


def test_the_packages_list_is_what_is_on_disk() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert {name: "/".join(name.split(".")[1:]) for name in packages_on_disk()} == mapping


def test_every_folder_with_code_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_wheel_holds_every_module_and_runs(tmp_path: Path) -> None:
    # From a copy of what git tracks: a left-over build folder would add modules that are gone.
    source = tmp_path / "source"
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    modules = {f"pdserve/{path.relative_to(ROOT)}" for path in tracked(*(f"{folder}/*.py" for folder in FOLDERS))}
    assert modules <= names
    assert not [name for name in names if "results/" in name or name.startswith("tests")]
    code = "import pdserve.router.choice as m; print(m.__file__)"
    shown = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(str(tmp_path / "site"))


def test_constraints_pin_every_dependency_exactly() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", pin) for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("demo", "bench", "dev"):
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in wanted:
        name = re.split(r"[\[><=; ]", requirement)[0].lower().replace("_", "-")
        assert name in pinned, requirement
    assert "torch==2.13.0" in pins


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_directions_hold(folder: str) -> None:
    """A cheap copy of import-linter's contracts: heavy libraries stay in their files."""
    allowed = {
        "ray": ("cluster/control/controller.py", "cluster/control/launcher.py", "deploy/"),
        "torch": (
            "workers/",
            "benchmarks/",
            "kvtransfer/transports/torch_dist.py",
            "kvtransfer/transports/torch_store.py",
        ),
        "nixl": ("kvtransfer/transports/nixl.py", "benchmarks/yardsticks.py"),
        "yaml": ("cluster/base/config.py",),
    }
    for path in (ROOT / folder).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots = {(node.module or "").partition(".")[0]}
            else:
                continue
            for library, places in allowed.items():
                assert library not in roots or name.startswith(places), f"{name} imports {library}"
            assert not roots & set(FOLDERS), f"{name} imports a bare folder name"


def test_environment_variables_are_read_in_one_file() -> None:
    # vllm_child is a program of another environment.
    allowed = (ROOT / "cluster" / "base" / "environment.py", ROOT / "benchmarks" / "vllm_child.py")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "os.environ" in path.read_text():
                assert path in allowed, path


def test_commands_of_the_readme_exist() -> None:
    from typer.main import get_command

    from pdserve.deploy.cli import application

    text = (ROOT / "README.md").read_text()
    scripts = set(re.findall(r"scripts/(\w+)", text))
    assert {"demo", "test", "check"} <= scripts
    for name in scripts:
        assert (ROOT / "scripts" / name).exists(), name
    commands = get_command(application).commands  # type: ignore[attr-defined]  # a click group
    fenced = "\n".join(text.split("```")[1::2])
    for name in re.findall(r"^pdserve (\w+)", fenced, re.MULTILINE) + re.findall(r"`pdserve (\w+)", text):
        assert name in commands, name
    for name in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"python -m (pdserve\.[\w.]+)", text):
        assert (ROOT / Path(*name.split(".")[1:])).with_suffix(".py").exists(), name


def test_no_path_of_a_machine_and_no_registry_is_in_the_project() -> None:
    pattern = re.compile(r"(?<![\w./])/(work|farm|root|home)/|pypi\.org|files\.pythonhosted|registry\.npmjs")
    this = Path(__file__)
    for path in tracked("*.py", "*.md", "*.toml", "*.txt", "*.yaml", "scripts/*", ".ci/*"):
        if path == this:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


def test_documents_are_there() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        assert len((ROOT / name).read_text()) > 200, name
    assert "Not yet" in (ROOT / "README.md").read_text()


def test_the_version_is_said_once() -> None:
    from pdserve.cluster.base.version import VERSION

    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "pdserve.cluster.base.version.VERSION"
    assert VERSION in (ROOT / "CHANGELOG.md").read_text()
