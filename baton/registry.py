"""Registry: a table of names and "module:attribute" texts, whose objects are imported when used.

An entry may also be the object itself, if importing it costs nothing. Plug-ins that the operator
allows (`baton/plugins.py`) come after the registry's own entries.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from baton import plugins
from baton.api.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Registry(Generic[T]):
    """A read-only table of lazily imported objects of one kind.

    Args:
        kind: kind of the entries, for error messages ("attention backend").
        entries: name -> ``"package.module:attribute"``, or the object itself.
        plugin_group: group of entry points that plug-ins use; empty: plug-ins add nothing.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, str] | Mapping[str, T],
        *,
        plugin_group: str = "",
    ) -> None:
        self.kind = kind
        self.plugin_group = plugin_group
        self._entries: dict[str, str | T] = {**entries}

    def names(self) -> list[str]:
        """Return all names in the order of their registration, with the names of plug-ins last."""
        added = plugins.allowed(self.plugin_group)
        return [*self._entries, *(name for name in added if name not in self._entries)]

    def check(self, name: str) -> None:
        """Raise ConfigError, which lists the known names, if a name is unknown."""
        if name not in self._entries and name not in (names := self.names()):
            known = ", ".join(names)
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {known}")

    def load(self, name: str) -> T:
        """Import and return the entry.

        Raises:
            ConfigError: the name is unknown, or its plug-in cannot be imported.
        """
        self.check(name)
        if name not in self._entries:
            return cast("T", plugins.allowed(self.plugin_group)[name].load())
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        module_name, _, attribute = entry.partition(":")
        return cast("T", getattr(importlib.import_module(module_name), attribute))

    def load_all(self) -> dict[str, T]:
        """Import and return all entries; log and skip a plug-in that cannot be imported."""
        loaded = {name: self.load(name) for name in self._entries}
        for name in self.names()[len(self._entries) :]:
            try:
                loaded[name] = self.load(name)
            except ConfigError as error:
                logger.warning("%s", error)
        return loaded
