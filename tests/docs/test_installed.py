"""What the documentation shows works with the wheel alone: in an environment that was empty, far from a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, Session, commands
from tests.files import ROOT
from tests.installed import Installed, build, install

pytestmark = pytest.mark.soak

# What a user of these pages has been told to install.
EXTRAS = ("run", "data", "plot")
# Pages that begin with packages of others, or need them in between.
BESIDE = ("docs/finetuning.md", "docs/commands/init.md")
SESSIONS = [
    page
    for page in PAGES
    if str(page.relative_to(ROOT)) not in BESIDE and any(not command.python for command in commands(page))
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    _, wheel, _ = build(tmp_path_factory.mktemp("sources"))
    return install(tmp_path_factory.mktemp("installed") / "environment", wheel, *EXTRAS)


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_session_works_from_the_wheel(page: Path, installed: Installed, tmp_path: Path) -> None:
    session = Session(page, tmp_path, installed)
    for command in commands(page):
        if command.python:
            continue
        status, output = session.run(command)
        assert status == command.status, f"`{command.text}` ends with {status}:\n{output}"
        assert command.shows(output), f"`{command.text}` prints\n{output}\ninstead of\n{command.output}"
        assert str(ROOT) not in output
