"""Where the project's files are; and files of the language, as text, for tests of all that comes after checking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import Spec

ROOT = Path(__file__).parents[1]
SHIPPED = (
    "grammars",
    "dsl",
    "compiler",
    "runtime",
    "importing",
    "cli",
    "testing",
    "specs",
)  # each a package of `partita`
SPECS = ROOT / "specs"
GOLDEN = ROOT / "tests" / "golden"


def parts(root: Path) -> list[Path]:
    """What the package `partita` has, of sources that are in a folder."""
    return [*(root / "api").iterdir(), *(root / each for each in SHIPPED)]


def checked(text: str, name: str, overrides: Sequence[str] = ()) -> Spec:
    """The meaning of a file. Raises Refused."""
    spec, diagnostics = load_text(text, name, overrides)
    if spec is None:
        raise Refused(diagnostics)
    return spec
