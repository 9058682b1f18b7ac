"""The diagnostics of one run, collected: several errors are reported, each place once, and at most a screenful."""

from __future__ import annotations

from collections.abc import Iterable

from partita.dsl import limits
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.elsewhere import meant
from partita.dsl.source import Span


class Full(Exception):
    """So many errors have been found that looking on does not help."""


class Report:
    """Diagnostics in the order in which they were found."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int | None, int], Diagnostic] = {}
        self.errors = 0  # met so far, each time it is met: who looks for new ones compares it before and after
        self._distinct = 0
        self.tokens = 0  # read so far, in all files

    def add(self, diagnostic: Diagnostic) -> None:
        """Take a diagnostic, unless its code was already reported at its place. Raises Full after too many."""
        span = diagnostic.span
        self.errors += diagnostic.severity == "error"
        key = (diagnostic.code, id(span.source) if span else None, span.start if span else len(self._found))
        if key in self._found:
            return
        self._found[key] = diagnostic
        self._distinct += diagnostic.severity == "error"
        if self._distinct >= limits.ERRORS:
            last = Diagnostic("E0009", f"stopped after {limits.ERRORS} errors")
            self._found["E0009", None, 0] = last
            raise Full

    def error(
        self, code: str, message: str, span: Span | None, notes: Iterable[str] = (), help: str | None = None
    ) -> None:
        """Report what is wrong."""
        self.add(Diagnostic(code, message, span, tuple(notes), help))

    def refused(self, refused: Refused) -> None:
        """Take the diagnostics of a refusal."""
        for diagnostic in refused.diagnostics:
            self.add(diagnostic)

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All of them, by file in the order of first mention, then by place; those without a place last."""
        sources: dict[int, int] = {}
        for diagnostic in self._found.values():
            if diagnostic.span is not None:
                sources.setdefault(id(diagnostic.span.source), len(sources))

        def place(diagnostic: Diagnostic) -> tuple[int, int]:
            span = diagnostic.span
            return (sources[id(span.source)], span.start) if span else (len(sources), 0)

        return tuple(sorted(self._found.values(), key=place))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that is most likely meant, if any is near; ready to stand in a message."""
    most = max(2, len(word) // 3) if len(word) > 3 else 1  # letters that may be missing or too many
    near = [c for c in candidates if abs(len(c) - len(word)) <= most][:500]
    if not near or len(word) > limits.NAME_CHARACTERS:
        return None
    same = next((c for c in near if c.lower() == word.lower()), None)
    if same is not None:
        return same
    from difflib import get_close_matches

    # Of short words one letter may be wrong, but not the first: few are mistyped there, and `sin` is no `min`.
    if len(word) <= 3:
        near = [c for c in near if c[:1] == word[:1]]
    found = get_close_matches(word, near, n=1, cutoff=0.66 if len(word) <= 3 else 0.75 if len(word) <= 5 else 0.8)
    return found[0] if found else None


def suggestion(word: str, candidates: Iterable[str], kind: str = "there are") -> str | None:
    """`did you mean …?`, or what there is to choose from where that is little."""
    choices = sorted(set(candidates))
    found = meant(word, choices) or nearest(word, choices)
    if found is not None:
        return f"did you mean `{found}`?"
    if choices and len(choices) <= 12:
        return f"{kind} {listed(choices)}"
    return None


def listed(names: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"
