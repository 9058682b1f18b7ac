"""Variants of a kind by name: schedules, optimizers, sources of data, transports, commands.

A variant is one module, which registers a record of all that is known of it when it is imported; whoever needs it looks
it up by name, and knows no other than by its record. Those that come with Partita are listed by name and imported when
they are looked up; one of a user's own is known as soon as its module is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol, TypeVar


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str:
        """How files and users call it."""


Variant = TypeVar("Variant", bound=Named)


class Registry(Mapping[str, Variant]):
    """The variants of one kind: those of the modules `names` in `package` in this order, then those of others."""

    def __init__(self, kind: str, package: str, names: Sequence[str]) -> None:
        self.kind = kind
        self._modules: dict[str, str | None] = {name: f"{package}.{name}" for name in names}
        self._records: dict[str, Variant] = {}

    def register(self, variant: Variant) -> Variant:
        """Add a variant. Raises ValueError where another one has its name."""
        # A module that is listed registers its own while it is imported.
        taken = self._modules.get(variant.name, "")
        if variant.name in self._records or (taken and taken not in sys.modules):
            raise ValueError(f"there is a {self.kind} `{variant.name}` already")
        self._modules.setdefault(variant.name, None)
        self._records[variant.name] = variant
        return variant

    def unregister(self, name: str) -> None:
        """Forget a variant that is not listed, as tests do with those that they make up."""
        assert self._modules[name] is None, f"{self.kind} `{name}` is listed"
        del self._modules[name], self._records[name]

    def __getitem__(self, name: str) -> Variant:
        module = self._modules[name]
        if name not in self._records and module is not None:
            import_module(module)
        return self._records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        return f"<Registry of {self.kind}s: {', '.join(self)}>"
