"""What is distributed is whole: the sources with all that their Makefile needs, the wheel with what commands need."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import partita
from partita.cli.extras import EXTRAS
from partita.runtime.tracking.tracker import TRACKERS
from tests.files import ROOT, SHIPPED
from tests.installed import Installed, build, install

# What is no module, and yet needed by commands.
DATA = {"specs": (".par", ".npz", ".jsonl"), "grammars": (".lark", ".json"), "cli/page": (".css", ".js")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Both archives, built of a copy of the sources, and what building has said."""
    return build(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def sources(built: tuple[Path, Path, str]) -> set[str]:
    with tarfile.open(built[0]) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path, str]) -> zipfile.ZipFile:
    return zipfile.ZipFile(built[1])


@pytest.mark.soak
def test_building_warns_of_nothing(built: tuple[Path, Path, str]) -> None:
    """But for what MANIFEST.in leaves out and is not there, and what the environment has switched off."""
    said = [line for line in built[2].splitlines() if "warning" in line.lower() or "deprecat" in line.lower()]
    usual = ("no previously-included files", "byte-compiling is disabled")
    assert [line for line in said if not any(each in line for each in usual)] == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "MANIFEST.in",
        "specs/digits.npz",
    ],
)
def test_the_sources_have(name: str, sources: set[str]) -> None:
    assert name in sources


@pytest.mark.parametrize("folder", ["tests", "docs", "bench", "api", *SHIPPED])
def test_the_sources_have_every_file_of(folder: str, sources: set[str]) -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", ".hypothesis", "runs"} & set(path.parts) and path.suffix != ".pyc"
    }
    assert there
    assert there - sources == set()


def test_the_sources_have_nothing_that_was_made(sources: set[str]) -> None:
    assert not [name for name in sources if name.endswith((".pyc", ".so")) or "__pycache__" in name]


def test_the_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    there = {f"partita/{path.name}" for path in (ROOT / "api").glob("*.py")}
    there |= {f"partita/{path.relative_to(ROOT)}" for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")}
    assert there - names == set()
    for folder, suffixes in DATA.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                assert f"partita/{path.relative_to(ROOT).as_posix()}" in names
    assert {"partita/py.typed", "partita/cli/page/uplot-1.6.32/LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "bench", "partita/tests"))]


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel alone in an environment that was empty."""
    return install(tmp_path_factory.mktemp("bare") / "environment", built[1])


@pytest.mark.soak
def test_the_wheel_works_alone(bare: Installed, tmp_path: Path) -> None:
    """The command starts, what it starts from is there, and what is missing is said with what installs it."""
    for command in ("init first", "check first.par", "compile first.par"):
        done = bare.run("partita", *command.split(), cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert str(ROOT) not in done.stdout
    done = bare.run("partita", "run", "first.par", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "partita: `partita run` needs torch, numpy, safetensors: pip install 'partita[run]'\n"
    place = bare.run("python", "-c", "import partita; print(partita.__file__)", cwd=tmp_path).stdout
    assert Path(place.strip()).is_relative_to(bare.folder)


@pytest.mark.soak
@pytest.mark.parametrize("extras", [(), *((name,) for name in EXTRAS if name not in TRACKERS), ("run", "data", "plot")])
def test_an_installation_lacks_nothing(extras: tuple[str, ...], built: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Of what its own packages and each extra require; and an extra is all that the command asks for."""
    try:
        installed = install(tmp_path / "environment", built[1], *extras)
    except PackageNotFoundError as error:
        pytest.skip(f"the tests' own environment has no {error.name}")
    pip = [sys.executable, "-m", "pip", "--python", str(installed.commands / "python"), "check"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    code = "import sys; from partita.cli.extras import missing; print([missing(e, e) for e in sys.argv[1:]])"
    done = installed.run("python", "-c", code, *extras, cwd=tmp_path)
    assert done.stdout == f"{[None] * len(extras)}\n", done.stdout + done.stderr


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_metadata_is_complete(metadata: Message, wheel: zipfile.ZipFile) -> None:
    assert metadata["Name"] == "partita"
    assert metadata["Version"] == partita.__version__ == PROJECT["project"]["version"]
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("Provides-Extra") == [*PROJECT["project"]["optional-dependencies"]]
    assert {*EXTRAS} <= {*PROJECT["project"]["optional-dependencies"]}
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text(encoding="utf-8")
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert any(each.startswith("Development Status") for each in classifiers)
    minors = {each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each}
    assert minors == {"3.11", "3.12", "3.13"}
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"partita = partita.cli.main:main" in wheel.read(entry)
