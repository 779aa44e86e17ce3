"""Plug-ins: entries that other installed packages add to Baton's registries, if allowed.

A package declares entry points in the groups below. The environment variable BATON_PLUGINS names
the packages whose entry points are used, or says ``all``; without the variable, none are used.
Metadata is read without importing anything; an entry is imported when it is used. Refuses to know:
the kinds of entries.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from baton.api.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "BATON_PLUGINS"
ALL = "all"
# Group of entry points -> kind of its entries, in words.
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "baton.architectures": "model architecture",
        "baton.attention": "attention backend",
        "baton.policies": "routing policy",
        "baton.proposers": "speculative method",
        "baton.reasoning_parsers": "reasoning parser",
        "baton.tool_parsers": "tool-call parser",
        "baton.transports": "KV connector",
    }
)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package.

    Attributes:
        name: name of the entry in its registry.
        where: place of the object, as ``"module:attribute"``.
        package, version: normalized name, and version, of the package.
    """

    group: str
    name: str
    where: str
    package: str
    version: str

    def load(self) -> Any:
        """Import and return the entry; raises ConfigError in one line, whatever goes wrong."""
        entry = EntryPoint(self.name, self.where, self.group)
        try:
            return entry.load()
        except (Exception, SystemExit) as error:  # a plug-in's import may raise anything
            said = " ".join(str(error).split())
            raise ConfigError(
                f"{GROUPS[self.group]} {self.name!r}: the plug-in {self.package} {self.version} "
                f"cannot be imported: {type(error).__name__}: {said:.200}"
            ) from error


def installed() -> list[Plugin]:
    """List the plug-ins of all installed packages, whether allowed or not."""
    found = [plugin for group in GROUPS for plugin in _of_group(group)]
    return sorted(found, key=lambda one: (one.package, one.group, one.name))


def is_allowed(plugin: Plugin) -> bool:
    """Return whether BATON_PLUGINS names a plug-in's package."""
    names = _allowed_names()
    return ALL in names or plugin.package in names


def missing_packages() -> list[str]:
    """Return the packages in BATON_PLUGINS that are not installed or have no plug-in."""
    return sorted(_allowed_names() - {ALL} - {plugin.package for plugin in installed()})


def allowed(group: str) -> Mapping[str, Plugin]:
    """Return the allowed plug-ins of a group, by name.

    Metadata is not read if no plug-in is allowed.
    """
    names = _allowed_names()
    return _allowed(group, names, tuple(sys.path)) if group and names else {}


@functools.lru_cache(maxsize=64)
def _allowed(group: str, names: frozenset[str], path: tuple[str, ...]) -> Mapping[str, Plugin]:
    """Return the allowed plug-ins of a group, by name.

    If plug-ins of several packages have the same name, the first package's plug-in is used.

    Args:
        path: where Python finds packages; only used as a part of the cache's key.
    """
    found: dict[str, Plugin] = {}
    for plugin in sorted(_of_group(group), key=lambda one: one.package):
        if ALL not in names and plugin.package not in names:
            continue
        first = found.setdefault(plugin.name, plugin)
        if first is not plugin:
            logger.warning(
                "%s %r of %s is left out: %s has one of this name",
                GROUPS[group],
                plugin.name,
                plugin.package,
                first.package,
            )
    return found


def _of_group(group: str) -> Iterator[Plugin]:
    for entry in entry_points(group=group):
        if entry.dist is not None:
            package = _normalized(entry.dist.name)
            yield Plugin(group, entry.name, entry.value, package, entry.dist.version)


def _allowed_names() -> frozenset[str]:
    given = os.environ.get(VARIABLE, "")
    return frozenset(_normalized(name) for name in given.split(",") if name.strip())


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
