"""The documentation is a site without a broken link, that asks nobody else for anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.files import ROOT

LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"'](\S+?)[\"']|<link\b[^>]*\bhref=[\"'](\S+?)[\"']")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).exists(), name
    assert (site / "specs" / "zoo" / "llama3.par").read_text() == (ROOT / "specs" / "zoo" / "llama3.par").read_text()


def test_it_asks_nobody_else_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = [address for page in pages for found in LOADED.findall(page.read_text()) for address in found if address]
    assert loaded
    assert not [address for address in loaded if re.match(r"(\w+:)?//", address)]


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "site.py", tmp_path / "docs")
    settings = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(settings[: settings.index("\nnav:")])
    lost = ["lost.md", "index.md#lost", "../specs/lost.par"]
    (tmp_path / "docs" / "index.md").write_text("\n".join(f"[here]({each})" for each in lost))
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert not [each for each in lost if each not in done.stdout + done.stderr]
