"""Collects the diagnostics of one run, deduplicated and limited in number; also suggests corrections of names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from attrs import evolve

from partita.dsl import limits
from partita.dsl.advice.foreign import meant
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.syntax.source import Span


class Full(Exception):
    """Raised to stop checking: there are too many errors, or a limit is exceeded."""


# One that is declared nowhere is used in many places.
NO_AXIS = "E0202"


class Report:
    """Diagnostics in the order in which they were found. What is refused in a `with` of a report is added to it."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int | str | None, int], Diagnostic] = {}
        self.errors = 0  # including duplicates; callers compare it before and after to detect new errors
        self._distinct = 0
        self.tokens = 0  # read so far, in all files
        self._notes: list[str] = []

    def add(self, diagnostic: Diagnostic) -> None:
        """Add a diagnostic, unless one of its code is at its place, or says the same of an axis. Raises Full after
        `limits.ERRORS` errors.
        """
        span = diagnostic.span
        self.errors += diagnostic.severity == "error"
        place = span.key if span else (None, len(self._found))
        key = (diagnostic.code, *place) if diagnostic.code != NO_AXIS else (NO_AXIS, diagnostic.message, 0)
        if key in self._found:
            return
        self._found[key] = evolve(diagnostic, notes=(*diagnostic.notes, *self._notes)) if self._notes else diagnostic
        self._distinct += diagnostic.severity == "error"
        if self._distinct >= limits.ERRORS:
            last = Diagnostic("E0009", f"stopped after {limits.ERRORS} errors")
            self._found["E0009", None, 0] = last
            raise Full

    def error(
        self, code: str, message: str, span: Span | None, notes: Iterable[str] = (), help: str | None = None
    ) -> None:
        """Report an error."""
        self.add(Diagnostic(code, message, span, tuple(notes), help))

    @contextmanager
    def noting(self, note: str) -> Iterator[None]:
        """Say of all that is found meanwhile where that was."""
        self._notes.append(note)
        try:
            yield
        finally:
            self._notes.pop()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Refused):
            return False
        for diagnostic in error.diagnostics:
            self.add(diagnostic)
        return True

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All diagnostics, by file in the order of first mention, then by position; those without a span last."""
        sources: dict[int, int] = {}
        for diagnostic in self._found.values():
            if diagnostic.span is not None:
                sources.setdefault(id(diagnostic.span.source), len(sources))

        def place(diagnostic: Diagnostic) -> tuple[int, int]:
            span = diagnostic.span
            return (sources[id(span.source)], span.start) if span else (len(sources), 0)

        return tuple(sorted(self._found.values(), key=place))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a misspelled word most likely means, if any is close."""
    tolerance = max(2, len(word) // 3) if len(word) > 3 else 1  # largest difference in length
    near = [c for c in candidates if abs(len(c) - len(word)) <= tolerance][:500]
    if not near or len(word) > limits.NAME_CHARACTERS:
        return None
    same = next((c for c in near if c.lower() == word.lower()), None)
    if same is not None:
        return same
    slips = [c for c in near if _exchanged(word, c) or (len(c) > 3 and word == c[1:])]
    if len(slips) == 1:
        return slips[0]
    from difflib import get_close_matches

    # A short word may have a wrong letter, but not the first: `sin` is not a misspelled `min`.
    alike = [c for c in near if c[:1] == word[:1] and abs(len(c) - len(word)) <= 1] if len(word) <= 5 else []
    matches = get_close_matches(word, alike, n=3, cutoff=0.66)
    if not matches and len(word) > 3:
        matches = get_close_matches(word, near, n=3, cutoff=0.75 if len(word) <= 5 else 0.8)
    swapped = (each for each in matches if sorted(each) == sorted(word))
    return next(swapped, matches[0] if matches else None)


def _exchanged(word: str, other: str) -> bool:
    """Whether two words differ in two neighbouring letters that are exchanged."""
    differ = [i for i, (a, b) in enumerate(zip(word, other, strict=False)) if a != b]
    if len(word) != len(other) or len(differ) != 2 or differ[1] - differ[0] != 1:
        return False
    return word[differ[0]] == other[differ[1]] and word[differ[1]] == other[differ[0]]


def suggestion(word: str, candidates: Iterable[str], kind: str = "there are") -> str | None:
    """`did you mean …?`, or the choices if there are few."""
    choices = sorted(set(candidates))
    closest = meant(word, choices) or nearest(word, choices)
    if closest is not None:
        return f"did you mean `{closest}`?"
    if choices and len(choices) <= 12:
        return f"{kind if len(choices) > 1 else kind.replace('there are', 'there is')} {listed(choices)}"
    return None


def listed(names: Iterable[str], last: str = "and") -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"
