"""ApiKeys: who may call the public APIs, by keys in a file. Knows neither gRPC nor HTTP."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from baton.errors import ConfigError, UnauthenticatedError
from baton.identity import ANYBODY, Principal, Role

logger = logging.getLogger(__name__)


class ApiKeys:
    """The keys of one router, and the names of the clients that they stand for.

    Args:
        path: a file of ``name:key`` lines; empty ones and those that begin with ``#`` are passed
            over. A name may have several keys, such as an old and a new one. None: anybody may
            call, and has no name.

    Raises:
        ConfigError: the file cannot be read or is wrong.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names = {} if path is None else _read(path)

    def principal_of(self, authorization: str) -> Principal:
        """Find who the header ``Bearer KEY`` is; raises UnauthenticatedError.

        Takes as long for a wrong key as for a right one.
        """
        if self._path is None:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("authorization: must be 'Bearer' and an API key")
        given = key.strip().encode(errors="surrogateescape")
        client = ""
        for known, name in self._names.items():
            if hmac.compare_digest(known, given):
                client = name
        if not client:
            raise UnauthenticatedError("authorization: is no API key of this router")
        return Principal(name=client, tenant=client, roles=frozenset({Role.INFER}))

    def reload(self) -> None:
        """Read the file again; when it is wrong, say so and keep the keys as they are."""
        if self._path is None:
            return
        try:
            self._names = _read(self._path)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error)
        else:
            logger.info("api_keys_file: read %s again", self._path)


def _read(path: Path) -> dict[bytes, str]:
    """Names by key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: cannot read {path} ({error})") from error
    names = dict(_parse(lines, f"api_keys_file: {path}"))
    if not names:
        raise ConfigError(f"api_keys_file: {path} has no key; nobody could call")
    return names


def _parse(lines: Iterable[str], source: str) -> Iterable[tuple[bytes, str]]:
    seen = set()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, _, key = (part.strip() for part in text.partition(":"))
        # (What is in the line is not told: it may be a key.)
        if not (name and key and key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"{source}: line {number}: must be name:key, the key one ASCII word")
        if key in seen:
            raise ConfigError(f"{source}: line {number}: the key is there twice")
        seen.add(key)
        yield key.encode(), name
