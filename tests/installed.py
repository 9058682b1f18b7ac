"""An installation: an environment of its own with a wheel of Partita, what the wheel asks for, and nothing else.

Nothing is fetched: a package that the wheel requires, with all that it requires in turn, is linked from the environment
of the tests. What the wheel does not say that it requires is not there, whatever the tests have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from attrs import frozen
from packaging.requirements import Requirement

from tests.files import ROOT

LEFT = shutil.ignore_patterns(".*", "runs", "dist", "*.egg-info", "__pycache__")
# Both by the backend itself, in an environment that is there.
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""


def build(folder: Path) -> tuple[Path, Path, str]:
    """Build sources and wheel in `folder`, of a copy of the sources; and what building has said."""
    copy = folder / "partita"
    shutil.copytree(ROOT, copy, ignore=LEFT, symlinks=True)
    shutil.rmtree(copy / "build", ignore_errors=True)
    (copy / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (sources,), (wheel,) = (copy / "dist").glob("*.tar.gz"), (copy / "dist").glob("*.whl")
    return sources, wheel, done.stdout + done.stderr


@frozen
class Installed:
    """An environment: its folder."""

    folder: Path

    @property
    def commands(self) -> Path:
        """Where its commands are."""
        return self.folder / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that uses it and nothing of ours."""
        ours = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**ours, "PATH": f"{self.commands}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(self, *command: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run one of its commands in a folder."""
        return subprocess.run(
            [str(self.commands / command[0]), *command[1:]],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def install(folder: Path, wheel: Path, *extras: str, python: str = sys.executable) -> Installed:
    """Install a wheel with its extras in a new environment, of this interpreter or another one.

    What is compiled is that of this one: another one can have what is Python alone.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True, timeout=120)
    found = Installed(folder)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        str(folder / "bin/python"),
    ]
    arguments = ["install", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (metadata,) = packages.glob("partita-*.dist-info")
    for each in required(Distribution.at(metadata), extras):
        _link(each, packages)
    return found


def required(of: Distribution, extras: tuple[str, ...]) -> list[Distribution]:
    """All that a distribution requires with some of its extras, directly or not. None is missing here."""
    found: dict[str, Distribution] = {}
    waiting = [*_required(of, extras)]
    while waiting:
        requirement = waiting.pop()
        if requirement.name not in found:
            found[requirement.name] = distribution(requirement.name)
            waiting += _required(found[requirement.name], tuple(requirement.extras))
    return [*found.values()]


def _required(of: Distribution, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in of.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            if requirement.name == of.metadata["Name"]:  # an extra of several others
                yield from _required(of, tuple(requirement.extras))
            else:
                yield requirement


def _link(package: Distribution, packages: Path) -> None:
    tops = {path.parts[0] for path in package.files or [] if path.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        link = packages / top
        if not link.exists():
            link.symlink_to(Path(str(package.locate_file(top))))
