"""Registry: a name -> "module:attribute" table whose entries are imported on first use.

Strings keep imports lazy (nothing is imported that is not chosen) and easy to grep for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from baton.api.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A read-only table of lazily imported things of one kind.

    Args:
        kind: what the entries are, for error messages ("attention backend").
        entries: name -> ``"package.module:attribute"``.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """List all registered names, in the order they were written down."""
        return list(self._entries)

    def check(self, name: str) -> None:
        """Raise ConfigError that lists the names if this one is unknown."""
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {known}")

    def load(self, name: str) -> T:
        """Import and return the entry; raises ConfigError that lists the names if unknown."""
        self.check(name)
        module_name, _, attribute = self._entries[name].partition(":")
        return cast("T", getattr(importlib.import_module(module_name), attribute))
