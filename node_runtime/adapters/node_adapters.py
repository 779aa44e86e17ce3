"""NodeAdapters: loads and unloads the LoRA adapters of a node, between two steps of its engine.

Another thread reads, checks and packs files while the engine continues. Nodes know adapters only by
digest; the router knows their names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from baton.adapters.digest import AdapterDigest, check_digest, shorten_digest
from baton.adapters.sources import find_named
from baton.api.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from baton.v1 import admin_pb2
from engine.adapters import AdapterView, ReadAdapter
from engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AskEngine(Protocol):
    """Calls a function on the engine's thread between two steps; raises the function's error."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


class NodeAdapters:
    """Loads, unloads and lists the adapters of a node for operators.

    Args:
        engine: computes requests with the adapters.
        ask_engine: calls a function on the engine's thread; see `EngineLoop.ask`.
        root: folder below which the folders of adapters must lie; None: adapters in folders are
            refused.
    """

    def __init__(self, engine: Engine, ask_engine: AskEngine, root: Path | None) -> None:
        self._engine, self._ask_engine = engine, ask_engine
        self._root = root

    async def load(
        self, digest: AdapterDigest, source: str, *, pinned: bool
    ) -> admin_pb2.AdaptersDescription:
        """Load an adapter, and read its files if they are not cached; return all loaded adapters.

        If every slot is in use, the packed adapter is cached in host memory, and requests with it
        wait for a slot.

        Args:
            digest: the adapter's digest, which the files must have.
            source: where the adapter's files are; see `find_named`.

        Raises:
            InvalidRequestError: the digest, the path or a file is wrong.
            OverloadedError: no slot is free for an adapter that is to be pinned.
        """
        check_digest(digest)
        table = self._engine.adapters
        adapter: ReadAdapter | None = None
        try:
            if not await self._ask(lambda: table.load_again(digest, pinned=pinned)):
                adapter = read = await asyncio.to_thread(self._read, digest, source)
                await self._ask(lambda: table.load(read, pinned=pinned))
                logger.info("loaded adapter %s from %r", shorten_digest(digest), source)
        except OverloadedError:
            if pinned:
                raise
            if adapter is not None:
                await self._ask(lambda: table.remember(read))
        return await self.describe()

    async def unload(self, digest: AdapterDigest) -> admin_pb2.AdaptersDescription:
        """Unload an adapter now or after its last request; return all adapters in memory.

        Does nothing if the adapter is not in memory: another adapter may have taken its slot.
        """
        check_digest(digest)
        try:
            has_left = await self._ask(lambda: self._engine.adapters.unload(digest))
        except NotFoundError:
            return await self.describe()
        how = "" if has_left else ", once its last request has ended"
        logger.info("unloads adapter %s%s", shorten_digest(digest), how)
        return await self.describe()

    async def describe(self) -> admin_pb2.AdaptersDescription:
        """Return all adapters in memory."""
        views = await self._ask(self._engine.adapters.views)
        return admin_pb2.AdaptersDescription(adapters=map(_to_proto, views))

    def _read(self, digest: AdapterDigest, source: str) -> ReadAdapter:
        if not self._engine.adapters.has_slots:
            raise InvalidRequestError("adapter", "this node loads none: --max-adapters is 0")
        return self._engine.adapters.read(find_named(self._root, source), digest)

    async def _ask(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result.

        Raises InvalidRequestError in place of ConfigError, because the node continues.
        """
        try:
            return await self._ask_engine(function)
        except ConfigError as error:
            raise InvalidRequestError(*str(error).split(": ", 1)) from error


def _to_proto(view: AdapterView) -> admin_pb2.AdapterDescription:
    return admin_pb2.AdapterDescription(
        digest=view.digest,
        num_bytes=view.num_bytes,
        is_pinned=view.is_pinned,
        is_leaving=view.is_leaving,
    )
