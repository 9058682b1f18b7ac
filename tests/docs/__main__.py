"""`make docs`: write into the pages what their commands print now.

Outputs that are still as shown stay as they are, and where only numbers have changed, only these are written: so what
was left out by hand (`…`) stays out, and seconds stay as they were.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, Session, commands, pictures, same_picture, steady


def refresh(page: Path) -> bool:
    """Put into a page what its commands print, where that differs. Whether anything did."""
    text = page.read_text(encoding="utf-8")
    changes: list[tuple[int, int, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        session = Session(page, Path(folder))
        for command in commands(page):
            status, output = session.run(command)
            if status != command.status:
                print(f"{page.relative_to(ROOT)}: `{command.text}` ends with {status}, not {command.status}")
            numbers = command.changes(output)
            start, end = command.place
            if numbers is None:
                changes.append((start, end, _trimmed(steady(output))))
            else:
                changes += [(start + first, start + last, number) for first, last, number in numbers]
        for picture in pictures(page):
            made = Path(folder) / picture.name
            if not picture.exists() or not same_picture(picture, made):
                picture.parent.mkdir(exist_ok=True)
                picture.write_bytes(made.read_bytes())
                print(f"{picture.relative_to(ROOT)}: drawn")
    for start, end, output in reversed(changes):
        text = text[:start] + output + text[end:]
    if changes:
        page.write_text(text, encoding="utf-8")
    return bool(changes)


def _trimmed(output: str) -> str:
    """An output without blanks at the ends of lines and blank lines at its end."""
    text = "\n".join(line.rstrip() for line in output.splitlines()).rstrip("\n")
    return text + "\n" if text else ""


def main() -> None:
    """Rewrite what is out of date, and name it."""
    for page in PAGES:
        if commands(page) and refresh(page):
            print(f"{page.relative_to(ROOT)}: rewritten")


if __name__ == "__main__":
    main()
