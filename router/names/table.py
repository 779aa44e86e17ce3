"""NameTable: maps each served name to its model, adapter and defaults.

A request looks its name up once.

    a request arrives -> its name is looked up -> it keeps the values found, and not the name
    an operator switches a name -> a new table replaces the old one

So a switch takes effect at once for all new requests, and running requests keep the values with
which they began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.access.identity import Principal
from baton.api.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from router.fleet.adapter_places import NO_SOURCE, AdapterSource
from router.names.base_model import BaseModel
from router.names.names_file import NamesFile
from router.names.served_name import ServedName

logger = logging.getLogger(__name__)

MAX_NAMES = 4096
MAX_SHOWN_CHARS = 100  # maximum number of characters of a name that errors quote
_MAX_SHOWN_NAMES = 8


class NameTable:
    """The served names of one router, on its event loop.

    Args:
        bases: the router's base models, at least one.
        names: what each name stands for, at least one; the first name is the default name.
        file: keeps changed names for the router's next start; None: changes are lost then.

    Attributes:
        bases: the router's base models.
    """

    def __init__(
        self,
        bases: Sequence[BaseModel],
        names: Iterable[ServedName],
        file: NamesFile | None = None,
    ) -> None:
        self.bases = tuple(bases)
        self._served: Mapping[str, ServedName] = {one.name: one for one in names}
        self._file = file
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._check(self._served)
        self._tell_sources()

    @property
    def names(self) -> Sequence[str]:
        """All served names, the default name first."""
        return tuple(self._served)

    @property
    def served(self) -> Sequence[ServedName]:
        """Meaning of each model name, the default name first."""
        return tuple(self._served.values())

    def served_to(self, principal: Principal) -> Sequence[ServedName]:
        """Return what each name that a caller may use stands for."""
        return [one for one in self._served.values() if _may_use(principal, one.name)]

    # ------------------------------------------------------------------ for requests

    def resolve(self, name: str | None, principal: Principal) -> ServedName:
        """Return what a request's model name stands for now.

        Args:
            name: the name; None: the first name that the caller may use.

        Raises:
            NotFoundError: there is no such name.
            PermissionDeniedError: the caller may not use the name.
            NodeUnavailableError: no node can serve the name, and none is expected back.
        """
        served = self._first(principal) if name is None else self._served.get(name)
        if served is None:
            raise NotFoundError(self._unknown(name or "", principal))
        if not _may_use(principal, served.name):
            raise PermissionDeniedError(f"model: {principal.name} may not use {served.name!r}")
        if len(self.bases) > 1:  # with a single base model, requests wait for its nodes instead
            served.base.check_nodes()
        if served.adapter:
            served.base.check_adapter(served.adapter)
        return served

    def find(self, name: str) -> ServedName:
        """Return what a name stands for; raises NotFoundError."""
        if name not in self._served:
            raise NotFoundError(self._unknown(name, Principal()))
        return self._served[name]

    def find_base(self, name: str) -> BaseModel:
        """Return the base model that an operator names, by ``--model`` or by a served name.

        Args:
            name: the base model's text in ``--model``, or a name for it; empty: the first base
                model.

        Raises NotFoundError.
        """
        if not name:
            return self.bases[0]
        for base in self.bases:
            if name == base.model:
                return base
        return self.find(name).base

    def own_names(self) -> Mapping[BaseModel, str]:
        """Return each base model's first name that has no adapter.

        A base model without such a name has its text in ``--model``.
        """
        found = {base: base.model for base in self.bases}
        for one in reversed(self.served):
            if not one.adapter:
                found[one.base] = one.name
        return found

    def find_adapter(self, name: str) -> str:
        """Return the digest of a name's adapter; empty: no adapter, or an unknown name."""
        served = self._served.get(name)
        return "" if served is None else served.adapter

    def _first(self, principal: Principal) -> ServedName:
        """Return the first name that a caller may use; if there is none, the default name."""
        usable = (one for one in self._served.values() if _may_use(principal, one.name))
        return next(usable, next(iter(self._served.values())))

    def _unknown(self, name: str, principal: Principal) -> str:
        shown = [repr(one.name) for one in self.served_to(principal)]
        more = f" and {len(shown) - _MAX_SHOWN_NAMES} more" if len(shown) > _MAX_SHOWN_NAMES else ""
        verb = "is" if len(shown) == 1 else "are"
        listed = ", ".join(shown[:_MAX_SHOWN_NAMES]) + more
        return f"model: {name[:MAX_SHOWN_CHARS]!r} does not exist here, {listed} {verb} served"

    # ------------------------------------------------------------------ for operators

    async def set_name(self, served: ServedName) -> None:
        """Make a name stand for these values from now on; running requests keep their values.

        Raises InvalidRequestError if there are too many names, or the file cannot be written.
        """
        await self._change(lambda: {**self._served, served.name: served})
        logger.info(
            "name %s: %s%s",
            served.name,
            served.base.model,
            f", adapter {served.adapter}" if served.adapter else "",
        )

    async def remove(self, name: str) -> None:
        """Remove a name; its running requests continue.

        Raises:
            NotFoundError: there is no such name.
            InvalidRequestError: the name is the last one, or the file cannot be written.
        """

        def without() -> Mapping[str, ServedName]:
            self.find(name)
            left = {key: one for key, one in self._served.items() if key != name}
            if not left:
                raise InvalidRequestError("name", f"{name!r} is the last one, and so it stays")
            return left

        await self._change(without)
        logger.info("name %s: removed", name)

    async def _change(self, make: Callable[[], Mapping[str, ServedName]]) -> None:
        """Replace the table by the result of `make`, even if the caller is cancelled meanwhile.

        Otherwise a cancelled change would release the lock while it still writes the file. It could
        then overwrite the next change's file, and the file would differ from the table.
        """
        change = asyncio.create_task(self._replace(make))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        await asyncio.shield(change)

    async def _replace(self, make: Callable[[], Mapping[str, ServedName]]) -> None:
        """Write the new table to the file, then replace the old table by it."""
        async with self._changing:
            served = make()
            try:
                self._check(served)
                if self._file is not None:
                    await asyncio.to_thread(self._file.write, tuple(served.values()))
            except ConfigError as error:
                raise InvalidRequestError("names", str(error)) from None
            self._served = served
            self._tell_sources()

    def _tell_sources(self) -> None:
        """Tell each base model's pool where to find the adapters that have names."""
        for base in self.bases:
            sources: dict[str, AdapterSource] = {}
            for one in self._served.values():
                if one.base is base and one.adapter:
                    before = sources.get(one.adapter, NO_SOURCE)
                    sources[one.adapter] = AdapterSource(
                        before.folder or one.adapter_source, before.is_pinned or one.pins_adapter
                    )
            base.pool.adapters.set_sources(sources)

    @staticmethod
    def _check(served: Mapping[str, ServedName]) -> None:
        if not 1 <= len(served) <= MAX_NAMES:
            raise ConfigError(f"names: must be 1 to {MAX_NAMES}, got {len(served)}")


def _may_use(principal: Principal, name: str) -> bool:
    return not principal.models or name in principal.models
