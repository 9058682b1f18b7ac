"""What a planted mistake is: a change of one file that a contributor might make, and who must notice."""

from __future__ import annotations

from attrs import frozen

VERIFY = "verify "


@frozen
class Planted:
    """One mistake. `old`, which stands in `file` exactly once, becomes `new`; `caught` is what must then fail: a test
    (`tests/….py` or `tests/….py::name`), or `verify FILE`, the command, with overrides if there are any.
    """

    name: str
    file: str
    old: str
    new: str
    caught: str

    def __str__(self) -> str:
        return self.name

    @property
    def by_verify(self) -> bool:
        """Whether it must be caught by the command `partita verify`."""
        return self.caught.startswith(VERIFY)

    def planted(self, text: str) -> str:
        """The text of the file with the mistake. ValueError where what it changes does not stand there once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: what it changes stands {count} times in {self.file}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: changes nothing")
        return text.replace(self.old, self.new)
