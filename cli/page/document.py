"""The whole page: content, styles and script in one document, whose policy permits nothing else."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from partita.cli.page.markup import Markup, joined, tag
from partita.cli.page.run import Run
from partita.cli.page.sections import content


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


# uPlot draws the charts. Its license goes wherever it goes.
STYLE = f"{_read('uplot/uPlot.min.css')}\n{_read('page.css')}"
SCRIPT = f"/*\n{_read('uplot/LICENSE')}*/\n{_read('uplot/uPlot.iife.min.js')}\n{_read('page.js')}"


def policy(live: bool) -> str:
    """The content security policy: only this script runs; requests go nowhere but, if `live`, to its host."""
    own = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def document(run: Run, live: bool) -> str:
    """The page of a run as of its last `refresh`. If it is `live`, its script asks for new content."""
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(live)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{run.name} · Partita"),
        tag("style", Markup(STYLE)),
    )
    body = tag(
        "body",
        tag("p", id="state", role="status") if live else None,
        tag("main", content(run)),
        tag("script", Markup(SCRIPT)),
        data_live=str(run.version) if live else None,
    )
    return "<!doctype html>\n" + joined(tag("html", top, body, lang="en")) + "\n"
