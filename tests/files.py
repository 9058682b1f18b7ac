"""Files of the language, as text, for tests of all that comes after checking them."""

from __future__ import annotations

from collections.abc import Sequence

from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from partita.dsl.spec import Spec


def checked(text: str, name: str, overrides: Sequence[str] = ()) -> Spec:
    """The meaning of a file. Raises Refused."""
    spec, diagnostics = load_text(text, name, overrides)
    if spec is None:
        raise Refused(diagnostics)
    return spec
