"""How long after a keystroke an editor has the diagnostics of `partita lsp`.

    python bench/editor.py [--keys N] [FILE ...]

A client of its own process talks to the server over standard input and output, as editors do. In the middle of each
file (by default specs/gpt.par and specs/zoo) it types a line of the language and takes it back, one character at a
time: most of what lies between is wrong. Times are from the change to the diagnostics of that version or a later one.

- key by key: each key follows the diagnostics of the one before.
- burst: a key every 15 ms, faster than anyone types, without waiting. `behind` is how many keys the diagnostics were
  behind at most, `checks` how many versions were checked.

At the end of each, the diagnostics are compared with those of `partita check`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from attrs import define, field
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient
from rich.console import Console
from rich.table import Table

from partita.dsl.load import load_text

SPECS = Path(__file__).parents[1] / "specs"
TYPED = "let zzz = gelu(x) + 0.5 * zzzz "
EVERY = 0.015  # seconds between the keys of a burst


@define(eq=False)
class Editor:
    """One document in an editor, and when the diagnostics of which version arrived."""

    client: LanguageClient
    uri: str
    version: int = 0
    changed: dict[int, float] = field(factory=dict)
    heard: list[tuple[int, float, list[lsp.Diagnostic]]] = field(factory=list)
    news: asyncio.Event = field(factory=asyncio.Event)

    def write(self, text: str) -> None:
        """Tell the server the next version of the document."""
        self.version += 1
        self.changed[self.version] = perf_counter()
        if self.version == 1:
            item = lsp.TextDocumentItem(self.uri, "par", 1, text)
            self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        else:
            document = lsp.VersionedTextDocumentIdentifier(self.version, self.uri)
            change = lsp.TextDocumentContentChangeWholeDocument(text)
            self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [change]))

    def hear(self, given: lsp.PublishDiagnosticsParams) -> None:
        """Diagnostics arrive."""
        if given.uri == self.uri:
            self.heard.append((given.version or 0, perf_counter(), list(given.diagnostics)))
            self.news.set()

    async def current(self) -> None:
        """Wait for the diagnostics of the last version."""
        while not self.heard or self.heard[-1][0] < self.version:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)

    def times(self, first: int) -> list[float]:
        """For each version from `first` on, seconds until the diagnostics of it or a later one."""
        return [
            next(at for heard, at, _ in self.heard if heard >= version) - self.changed[version]
            for version in range(first, self.version + 1)
        ]

    def behind(self, first: int) -> int:
        """How many versions newer than what was checked there were, at most, when diagnostics arrived."""
        return max(
            sum(at < arrived for at in self.changed.values()) - version
            for version, arrived, _ in self.heard
            if version >= first
        )


def versions(text: str, keys: int) -> list[str]:
    """What the document is after each key, typed at the middle line of a block's or model's body."""
    lines = text.split("\n")
    bodies = [i for i, line in enumerate(lines) if line.startswith("  ") and line.strip().startswith("let ")]
    at = bodies[len(bodies) // 2] if bodies else len(lines) // 2
    before, after = "\n".join(lines[:at]) + "\n  ", "\n" + "\n".join(lines[at:])
    there_and_back = [*range(1, len(TYPED) + 1), *range(len(TYPED) - 1, -1, -1)]
    return [before + TYPED[: there_and_back[i % len(there_and_back)]] + after for i in range(keys)]


def agrees(editor: Editor, text: str, path: Path) -> bool:
    """Whether the last diagnostics are those of `check`: codes, places and messages."""
    _, found = load_text(text, str(path), path=path)
    said = [(each.code, each.range.start.line + 1, each.message.split("\n")[0]) for each in editor.heard[-1][2]]
    return said == [(each.code, each.span.line if each.span else 1, each.message.split("\n")[0]) for each in found]


async def measure(client: LanguageClient, path: Path, keys: int, listen: dict[str, Editor]) -> list[str]:
    """One row of the table."""
    editor = listen[path.as_uri()] = Editor(client, path.as_uri())
    text = path.read_text()
    editor.write(text)
    await editor.current()
    opened = editor.times(1)[0]
    typed = versions(text, keys)
    first = editor.version + 1
    for each in typed:
        editor.write(each)
        await editor.current()
    single = editor.times(first)
    same = agrees(editor, typed[-1], path)
    first = editor.version + 1
    for each in typed:
        editor.write(each)
        await asyncio.sleep(EVERY)
    await editor.current()
    same &= agrees(editor, typed[-1], path)
    burst = editor.times(first)
    checks = sum(version >= first for version, *_ in editor.heard)
    document = lsp.TextDocumentIdentifier(path.as_uri())
    client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))
    figures = [f"{1e3 * opened:.0f}", *_shown(single), *_shown(burst), str(editor.behind(first)), f"{checks}/{keys}"]
    return [path.stem, *figures, "yes" if same else "NO"]


def _shown(seconds: list[float]) -> list[str]:
    last = quantiles(seconds, n=20, method="inclusive")[-1]
    return [f"{1e3 * each:.0f}" for each in (median(seconds), last, max(seconds))]


async def session(paths: list[Path], keys: int) -> None:
    """All files in one server, as an editor has it."""
    client = LanguageClient("bench", "1")
    listen: dict[str, Editor] = {}

    @client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
    def published(given: lsp.PublishDiagnosticsParams) -> None:
        if given.uri in listen:
            listen[given.uri].hear(given)

    start = perf_counter()
    await client.start_io(sys.executable, "-m", "partita", "lsp")
    await client.initialize_async(lsp.InitializeParams(lsp.ClientCapabilities()))
    client.initialized(lsp.InitializedParams())
    print(f"started in {perf_counter() - start:.2f} s")
    columns = ("", "open", "key", "95%", "worst", "burst", "95%", "worst", "behind", "checks", "as check")
    table = Table(*columns, title="Milliseconds until diagnostics", title_justify="left")
    for path in paths:
        table.add_row(*await measure(client, path, keys, listen))
    Console(width=120).print(table)
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: specs/gpt.par and specs/zoo")
    parser.add_argument("--keys", type=int, default=120, help="keys that are typed in each file (default 120)")
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.files] or [SPECS / "gpt.par", *sorted((SPECS / "zoo").glob("*.par"))]
    asyncio.run(session(paths, arguments.keys))


if __name__ == "__main__":
    main()
