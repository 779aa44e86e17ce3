"""Ignored fields: reports request fields without effect in a response header and in the log.

Clients choose the field names, so the length and the number of reported names are limited.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from aiohttp import web

IGNORED_FIELDS = web.RequestKey("ignored_fields", tuple[str, ...])
IGNORED_FIELDS_HEADER = "X-Baton-Ignored-Fields"
MAX_TOLD = 16
MAX_NAME_CHARS = 64
_MAX_REMEMBERED = 256
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)

logger = logging.getLogger(__name__)


def note_ignored(request: web.Request, names: Sequence[str]) -> None:
    """Store the names of fields without effect, which the response's header will report."""
    if names:
        told = (*request.get(IGNORED_FIELDS, ()), *map(_shown, names[:MAX_TOLD]))
        num_more = len(names) - MAX_TOLD
        request[IGNORED_FIELDS] = (*told, f"and {num_more} more") if num_more > 0 else told


def _shown(name: str) -> str:
    """Return a field name, shortened and escaped, so that headers and logs may contain it."""
    name = name[:MAX_NAME_CHARS]
    return name if _PLAIN.fullmatch(name) else "?"


class IgnoredFieldsLog:
    """Logs the name of an ignored field only once, because clients repeat their fields."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, names: Sequence[str], request_id: str) -> None:
        """Log those field names that were not logged before."""
        new = [name for name in names if name not in self._names]
        if new and len(self._names) < _MAX_REMEMBERED:
            self._names.update(new)
            logger.warning(
                "request %s: fields without an effect: %s (told once; %s tells clients)",
                request_id,
                ", ".join(new),
                IGNORED_FIELDS_HEADER,
            )
