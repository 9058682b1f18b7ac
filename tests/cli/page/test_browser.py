"""The pages in a real browser: Debian's `chromium`, where there is one. Elsewhere these tests are left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from partita.cli.page.run import Run
from partita.cli.page.server import Server
from tests.cli.page.runs import SCRIPT, append, step, written
from tests.commands import here

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="pages are not tried in a browser: apt-get install chromium")

NARROW, WIDE = {"width": 390, "height": 800}, {"width": 1280, "height": 900}
# Elements that reach out of the page and are not within something that scrolls.
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(each => !each.closest(".scroll, .x"))
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Where tests run as root, as in containers, Chromium's sandbox cannot.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Seen:
    """What a page does besides being shown: what it says to the console, and what it requests."""

    def __init__(self, page: Page) -> None:
        self.said: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append("a dialog"))
        page.on("request", lambda request: self.requested.append(request.url))


def test_the_report(browser: Browser, tmp_path: Path) -> None:
    written(tmp_path, name=SCRIPT.replace("/", ""))
    assert here("report", SCRIPT.replace("/", ""), "-o", "page.html", cwd=tmp_path).returncode == 0
    address = (tmp_path / "page.html").as_uri()
    backgrounds = set()
    for scheme, size in (("light", WIDE), ("dark", NARROW)):
        with browser.new_page(color_scheme=scheme, viewport=size) as page:  # type: ignore[arg-type]
            seen = Seen(page)
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            assert page.evaluate(OUTSIDE) == []
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            page.locator(".u-over").first.hover(position={"x": 1, "y": 50})
            legend = page.locator(".u-legend").first
            assert legend.inner_text() == "step1training4evaluation1.25"
            assert page.evaluate("window.taken") is None
            assert page.locator("script").count() == 1
            page.locator("tbody th a").first.click()
            assert page.evaluate("document.querySelector(':target').textContent").startswith("  param w: [embed]")
            assert seen.said == []
            assert {each.partition("#")[0] for each in seen.requested} == {address}
    assert len(backgrounds) == 2


def test_no_other_script_would_run(browser: Browser, tmp_path: Path) -> None:
    """If something were not escaped, the page's policy would still not let it run, or request anything."""
    written(tmp_path)
    assert here("report", "run", "-o", "page.html", cwd=tmp_path).returncode == 0
    path = tmp_path / "page.html"
    path.write_text(path.read_text().replace("</main>", f"{SCRIPT}<img src='http://127.0.0.1:9/x'></main>"))
    with browser.new_page() as page:
        seen = Seen(page)
        page.goto(path.as_uri())
        assert page.evaluate("window.taken") is None
        assert len([each for each in seen.said if "Content Security Policy" in each]) >= 3


def test_a_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path)
    with Server(Run(path)) as server, browser.new_page(viewport=NARROW) as page:  # type: ignore[arg-type]
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        seen = Seen(page)
        try:
            page.goto(server.address)
            page.get_by_text("4 of 6").wait_for()
            page.locator("#state", has_text="live").wait_for()
            page.get_by_text("the numbers").click()
            page.locator("summary", has_text="m.par").click()
            append(path, step(5), step(6))
            page.get_by_text("6 of 6").wait_for(timeout=30_000)
            # What was opened stays open, and what was closed stays closed.
            assert page.locator("details[open] > summary").all_inner_texts() == ["the numbers"]
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
            assert seen.said == []
            assert {each.split("?")[0] for each in seen.requested} == {
                f"http://127.0.0.1:{server.server_port}/{name}" for name in ("", "content")
            }
        finally:
            page.goto("about:blank")
            server.shutdown()
            thread.join()
