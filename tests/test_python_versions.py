"""Other versions of Python than the one that the tests run with: those that the package says it supports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.files import ROOT
from tests.installed import build, install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]


def at_hand(version: str) -> str | None:
    """An interpreter of a version that starts: on the path, or of pyenv."""
    places = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for place in filter(None, places):
        done = subprocess.run([place, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return str(place)
    return None


def test_the_oldest_is_what_the_tools_check() -> None:
    """Ruff and mypy refuse what the oldest supported version lacks."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert tools["mypy"]["python_version"] == VERSIONS[0]
    assert tools["ruff"]["target-version"] == f"py{VERSIONS[0].replace('.', '')}"


@pytest.mark.parametrize("python", ["python3", "python3.12", "/opt/python3.13/bin/python3.13"])
def test_make_sets_up_an_environment_of_its_own(python: str) -> None:
    command = ["make", "--dry-run", "--always-make", "types", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    folder = ".venv" if python == "python3" else f".venv-{Path(python).name}"
    assert f"{python} -m venv {folder}\n" in done.stdout
    assert done.stdout.endswith(f"{folder}/bin/mypy\n")


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_types_hold_in_newer_versions(version: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", f"--python-version={version}", f"--cache-dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in_every_version_that_is_at_hand(version: str, tmp_path: Path) -> None:
    """All that needs no extra, whose requirements are Python alone and so can be linked from those of the tests."""
    python = at_hand(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    _, wheel, _ = build(tmp_path)
    installed = install(tmp_path / "environment", wheel, python=python)
    for command in ("init --from llama", "check llama.par", "fmt llama.par", "compile llama.par", "explain llama.par",
                    "schedule llama.par", "plan llama.par --devices 4 --within 2"):  # fmt: skip
        done = installed.run("partita", *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Error" not in done.stderr
    shown = installed.run("python", "--version", cwd=tmp_path).stdout
    assert shown.startswith(f"Python {version}.")
