"""Registry: a table of names and "module:attribute" texts; entries are imported on first use.

Texts keep imports lazy and can be found by grep. An entry whose import costs nothing may be the
object itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from baton.api.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A read-only table of lazily imported objects of one kind.

    Args:
        kind: kind of the entries, for error messages ("attention backend").
        entries: name -> ``"package.module:attribute"``, or the object itself.
    """

    def __init__(self, kind: str, entries: Mapping[str, str] | Mapping[str, T]) -> None:
        self.kind = kind
        self._entries: dict[str, str | T] = {**entries}

    def names(self) -> list[str]:
        """Return all registered names in order."""
        return list(self._entries)

    def check(self, name: str) -> None:
        """Raise ConfigError, which lists the known names, if a name is unknown."""
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {known}")

    def load(self, name: str) -> T:
        """Import and return the entry; an unknown name raises ConfigError listing all names."""
        self.check(name)
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        module_name, _, attribute = entry.partition(":")
        return cast("T", getattr(importlib.import_module(module_name), attribute))
