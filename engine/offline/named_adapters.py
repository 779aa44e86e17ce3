"""NamedAdapters: the LoRA adapters of an `LLM`, by the names that its callers give them.

The engine knows adapters by digest, and unloads the least recently used ones; this table keeps
their files' places, so that they come back when needed. Refuses to know: requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from baton.adapters.digest import NO_ADAPTER, AdapterDigest, AdapterError
from baton.adapters.sources import locate_adapter
from baton.api.errors import InvalidRequestError
from engine.adapters import AdapterTable

_MAX_NAME_CHARS = 256  # maximum number of characters of an adapter's name


@dataclass(frozen=True, slots=True)
class _NamedAdapter:
    """The adapter that is registered under one name, and the source of its files."""

    digest: AdapterDigest
    folder: Path
    pinned: bool


class NamedAdapters:
    """The names of one engine's adapters.

    Args:
        table: the adapters in memory.
    """

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._adapters: dict[str, _NamedAdapter] = {}

    def load(self, name: str, source: str | Path, *, pinned: bool) -> AdapterDigest:
        """Load an adapter, or replace the adapter of this name; see `LLM.load_adapter`."""
        _check_adapter_name(name)
        if not isinstance(source, str | Path):
            problem = f"must be a path or a text, got {type(source).__name__}"
            raise InvalidRequestError("adapter", problem)
        path = locate_adapter(source)
        adapter = self._table.read(path)
        others = [one for other, one in self._adapters.items() if other != name]
        is_pinned = pinned or any(one.pinned and one.digest == adapter.digest for one in others)
        self._table.load(adapter, pinned=is_pinned)
        before = self._adapters.get(name)
        self._adapters[name] = _NamedAdapter(adapter.digest, path, pinned)
        if before is not None:
            self._let_adapter_leave(before.digest)
        return adapter.digest

    def unload(self, name: str) -> None:
        """Forget a name, and unload its adapter; see `LLM.unload_adapter`."""
        digest = self._named(name).digest
        del self._adapters[name]
        self._let_adapter_leave(digest)

    def digest(self, name: str) -> AdapterDigest:
        """Return the digest of the adapter that a name refers to.

        An empty name means the base model, whose digest is empty.
        """
        return self._named(name).digest if name else NO_ADAPTER

    def names_of(self, digests: Collection[AdapterDigest]) -> set[str]:
        """Return the names of some adapters."""
        return {name for name, one in self._adapters.items() if one.digest in digests}

    def load_again(self, names: Collection[str]) -> None:
        """Load those of the named adapters that were evicted; an empty name means the base model.

        Raises:
            InvalidRequestError: no adapter has one of the names.
            AdapterError: the files have changed since they were first read.
            OverloadedError: there are too few slots for these adapters and those of open requests.
        """
        wanted = [self._named(name) for name in sorted(names) if name]
        digests = {one.digest for one in wanted}
        for one in wanted:
            if one.digest in self._table.digests:
                continue
            if self._table.load_again(one.digest, pinned=one.pinned, kept=digests):
                continue
            adapter = self._table.read(one.folder)
            if adapter.digest != one.digest:
                raise AdapterError(f"{one.folder}: has changed since it was loaded; load it again")
            self._table.load(adapter, pinned=one.pinned, kept=digests)

    def _let_adapter_leave(self, digest: AdapterDigest) -> None:
        """Unload the adapter with this digest, unless another name still refers to it."""
        is_named = any(one.digest == digest for one in self._adapters.values())
        # False: the adapter is already unloaded
        if not is_named and digest in self._table.digests:
            self._table.unload(digest)

    def _named(self, name: str) -> _NamedAdapter:
        found = self._adapters.get(name)
        if found is None:
            known = ", ".join(map(repr, sorted(self._adapters))) or "none"
            problem = f"{name!r:.80} is not loaded; loaded: {known:.400}"
            raise InvalidRequestError("adapter", problem)
        return found


def _check_adapter_name(name: object) -> None:
    """Raise InvalidRequestError if a name is empty, too long or not printable."""
    if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARS and name.isprintable()):
        problem = f"must have a name of 1 to {_MAX_NAME_CHARS} printable characters"
        raise InvalidRequestError("adapter", f"{problem}, got {name!a:.99}")
