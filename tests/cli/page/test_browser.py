"""The pages in a real browser: Debian's `chromium`, where there is one. Elsewhere these tests are left out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from partita.cli.page.document import document
from partita.cli.page.run import Run
from partita.cli.page.server import Server
from tests.cli.page.runs import PIPE, RECORDS, SCRIPT, append, step, written
from tests.commands import here

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    Opener: TypeAlias = Callable[..., AbstractContextManager[Page]]

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="pages are not tried in a browser: apt-get install chromium")

NARROW, WIDE = {"width": 390, "height": 800}, {"width": 1280, "height": 900}
# Elements that reach out of the page and are not within something that scrolls.
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(each => !each.closest(".scroll, .x"))
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1).map(each => each.outerHTML.slice(0, 80))"""

# Per chart: how far the plot is from the left, and where in that gutter something is drawn, in pixels of the canvas.
GUTTERS = """() => [...document.querySelectorAll(".uplot")].map(each => {
  const canvas = each.querySelector("canvas"), place = each.querySelector(".u-over").getBoundingClientRect();
  const gutter = Math.round((place.left - canvas.getBoundingClientRect().left) * devicePixelRatio);
  const { data } = canvas.getContext("2d").getImageData(0, 0, gutter, canvas.height), inked = new Set();
  for (let i = 3; i < data.length; i += 4) if (data[i]) inked.add(((i - 3) / 4) % gutter);
  return [gutter, Math.min(...inked), inked.size];
})"""
# A long word, and a line that is longer than any page, which samples and messages may have.
LONG = "x" * 400
SAMPLE = {"step": 4, "eval_loss": 1.25, "sample": f"{LONG} {'a b ' * 200}\n{LONG}"}
MANY = [
    step(number, **{f"number_{i}": 10.0**i for i in range(-9, 10, 3)}, bad=f"the loss of step {number} is nan {LONG}")
    for number in range(1, 61)
]


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


@pytest.fixture
def report(browser: Browser, tmp_path: Path) -> Opener:
    """Opens the page of a run with these records."""

    @contextmanager
    def opened(records: Sequence[dict[str, Any]], size: Any = NARROW, **more: Any) -> Iterator[Page]:
        run = Run(written(tmp_path, records=records, **more))
        run.refresh()
        path = tmp_path / "page.html"
        path.write_text(document(run, live=False))
        with browser.new_page(viewport=size) as page:
            seen = Seen(page)
            page.goto(path.as_uri())
            yield page
            assert seen.said == []

    return opened


def test_nothing_scrolls_sideways_but_within_itself(report: Opener) -> None:
    """Even when all that is folded is open; what does scroll shows by its shadow that there is more."""
    with report([*MANY, SAMPLE], text=PIPE) as page:
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        assert page.evaluate(OUTSIDE) == []
        inner = page.locator(".scroll").evaluate_all(
            "found => found.filter(each => each.scrollWidth > each.clientWidth)"
            ".map(each => getComputedStyle(each).backgroundImage.split('linear-gradient').length - 1)"
        )
        assert len(inner) >= 3
        assert set(inner) == {6}


def test_the_head_of_a_table_stays_while_its_rows_scroll(report: Opener) -> None:
    with report(MANY, WIDE) as page:
        table = page.locator("section", has_text="what happened").locator(".scroll").first
        assert table.evaluate("each => { each.scrollTop = 200; return each.scrollTop; }") == 200
        head, around = ((found.bounding_box() or {})["y"] for found in (table.locator("thead th").first, table))
        assert head == pytest.approx(around, abs=1)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_labels_stand_beside_the_plot_and_are_whole(report: Opener, size: dict[str, int]) -> None:
    with report(MANY, size) as page:
        for gutter, first, inked in page.evaluate(GUTTERS):
            assert gutter >= 30
            assert first >= 1  # nothing is cut
            assert inked >= 8


def test_a_chart_can_be_logarithmic_and_shows_the_steps_that_are_chosen(browser: Browser, tmp_path: Path) -> None:
    """What its reader has chosen stays when the run goes on."""
    path = written(tmp_path, records=[step(number) for number in range(1, 81)])
    with live(browser, path) as page:
        button = page.locator("figure.large button")
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        plot = page.locator("figure.large .u-over")
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
        page.mouse.up()

        def at_the_edges() -> list[int]:
            found = []
            for x in (1, box["width"] - 1):
                plot.hover(position={"x": x, "y": 50})
                found.append(int(page.locator("figure.large .u-value").first.inner_text()))
            return found

        assert at_the_edges() == pytest.approx([21, 40], abs=1)
        append(path, step(81))
        page.locator("dd", has_text="81 of 6").wait_for(timeout=30_000)
        assert page.locator("figure.large button").get_attribute("aria-pressed") == "true"
        assert at_the_edges() == pytest.approx([21, 40], abs=1)
        plot.dblclick()
        assert at_the_edges() == pytest.approx([1, 81], abs=1)


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


@contextmanager
def live(browser: Browser, path: Path) -> Iterator[Page]:
    """The live page of a run."""
    with Server(Run(path)) as server, browser.new_page(viewport=NARROW) as page:  # type: ignore[arg-type]
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        seen = Seen(page)
        try:
            page.goto(server.address)
            page.locator("#state", has_text="live").wait_for()
            yield page
            assert seen.said == []
            assert {each.split("?")[0] for each in seen.requested} == {
                f"http://127.0.0.1:{server.server_port}/{name}" for name in ("", "content")
            }
        finally:
            page.goto("about:blank")
            server.shutdown()
            thread.join()


@pytest.mark.soak
def test_a_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path, records=[*RECORDS, SAMPLE])
    with live(browser, path) as page:
        page.get_by_text("4 of 6").wait_for()
        page.get_by_text("the numbers").click()
        page.locator("summary", has_text="m.par").click()
        append(path, step(5), step(6))
        page.get_by_text("6 of 6").wait_for(timeout=30_000)
        # What was opened stays open, and what was closed stays closed.
        assert page.locator("details[open] > summary").all_inner_texts() == ["the numbers", "step 4"]
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        assert page.evaluate(OUTSIDE) == []
