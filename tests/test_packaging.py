"""What is distributed is whole: the sources with all that their Makefile needs, the wheel with what commands need."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import partita
from tests.files import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LEFT = shutil.ignore_patterns(".*", "runs", "dist", "*.egg-info", "__pycache__")
# Both by the backend itself, in an environment that is there: nothing is fetched.
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both archives, built of a copy of the sources."""
    folder = tmp_path_factory.mktemp("sources") / "partita"
    shutil.copytree(ROOT, folder, ignore=LEFT, symlinks=True)
    shutil.rmtree(folder / "build", ignore_errors=True)
    (folder / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def sources(built: Path) -> set[str]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


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


@pytest.mark.parametrize(
    "folder", ["tests", "docs", "bench", "specs", "grammars", *PROJECT["tool"]["setuptools"]["package-dir"].values()]
)
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
    for package, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        for path in (ROOT / folder).glob("*.py"):
            assert f"{package.replace('.', '/')}/{path.name}" in names
    for path in (ROOT / "specs").rglob("*.par"):
        assert f"partita/{path.relative_to(ROOT).as_posix()}" in names
    assert {"partita/py.typed", "partita/specs/digits.npz", "partita/grammars/par.json"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "bench", "partita/tests"))]


def test_a_wheel_that_is_unpacked_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The command starts, and what it starts from is there."""
    wheel.extractall(tmp_path / "packages")
    (tmp_path / "work").mkdir()
    where = ["-c", "import partita; print(partita.__file__)"]
    for command in (where, ["-m", "partita", "init", "first"], ["-m", "partita", "check", "first.par"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path / "work",
            env={"PYTHONPATH": str(tmp_path / "packages"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert str(ROOT) not in done.stdout + done.stderr
    assert (tmp_path / "work" / "first.par").exists()


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
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text(encoding="utf-8")
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert any(each.startswith("Development Status") for each in classifiers)
    assert {"run", "plot", "test"} <= set(metadata.get_all("Provides-Extra") or [])
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"partita = partita.cli.main:main" in wheel.read(entry)
