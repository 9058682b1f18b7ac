"""Registries of variants by name: schedules, optimizers, data sources, transports, commands.

A variant is one module, which registers a record that describes it when it is imported; its users look up the record by
name and know nothing else about it. Built-in variants are listed by name and imported on first lookup; a user's own is
known once its module is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol, TypeVar


class Named(Protocol):
    """A record in a registry."""

    @property
    def name(self) -> str:
        """The name in files and on the command line."""


Variant = TypeVar("Variant", bound=Named)


class Registry(Mapping[str, Variant]):
    """The variants of one kind: those in the modules `names` of `package`, in this order, then others."""

    def __init__(self, kind: str, package: str, names: Sequence[str]) -> None:
        self.kind = kind
        self._modules: dict[str, str | None] = {name: f"{package}.{name}" for name in names}
        self._records: dict[str, Variant] = {}

    def register(self, variant: Variant) -> Variant:
        """Add a variant. Raises ValueError if its name is taken."""
        # A listed module registers its variant while it is being imported.
        module = self._modules.get(variant.name, "")
        if variant.name in self._records or (module and module not in sys.modules):
            raise ValueError(f"there is a {self.kind} `{variant.name}` already")
        self._modules.setdefault(variant.name, None)
        self._records[variant.name] = variant
        return variant

    def unregister(self, name: str) -> None:
        """Remove a variant that is not listed, as tests do with their own."""
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
