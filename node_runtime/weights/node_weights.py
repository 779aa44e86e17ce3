"""NodeWeights: changes the weights of a node's engine, between two steps.

Refuses to know: routers. The caller of `use` or `sleep` must ensure that no router sends new
requests to the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton.api.changes import SleepLevel
from baton.api.errors import InvalidRequestError
from baton.checkpoint.new_weights import open_weights_of
from engine.engine import Engine
from engine.weights import ServedWeights
from node_runtime.adapters.node_adapters import AskEngine

T = TypeVar("T")


class NodeWeights:
    """The weights of a node, and their replacement.

    Args:
        engine: the engine, which `ask_engine` reaches between two steps.
        served: the engine's weights.
        ask_engine: calls a function on the engine's thread; see `EngineLoop.ask`.
        root: folder below which new weights must lie; None: no weights may be loaded.
        on_used: called on the engine's thread when the engine begins to use other weights.
    """

    def __init__(
        self,
        engine: Engine,
        served: ServedWeights,
        ask_engine: AskEngine,
        root: Path | None,
        on_used: Callable[[], None],
    ) -> None:
        self._engine, self._served, self._ask = engine, served, ask_engine
        self._root, self._on_used = root, on_used

    @property
    def digest(self) -> str:
        """Return the version of the weights that are in use, or were in use before a sleep."""
        return self._served.digest

    @property
    def is_asleep(self) -> bool:
        """Return whether the engine sleeps, so that it can compute nothing."""
        return self._served.is_asleep

    async def begin(self, source: str) -> str:
        """Begin to load new weights while steps continue; return the new weights' version.

        Args:
            source: path of the new weights, below ``root``.

        Raises InvalidRequestError if the weights belong to another model, or if ``root`` is None.
        """
        path = self._find(source)
        new = await asyncio.to_thread(open_weights_of, path, self._served.folder)
        try:
            await self._ask(lambda: self._served.begin(new))
        except BaseException:
            new.close()
            raise
        return new.digest

    async def is_ready(self) -> bool:
        """Return whether new weights are loaded; raises InvalidRequestError if they are unfit."""
        return await self._ask(self._served.is_ready)

    async def drop(self) -> None:
        """Drop the new weights without using them."""
        await self._ask(self._served.drop)

    async def use(self) -> bool:
        """Switch to the new weights, unless a request is open.

        Return whether the switch happened.
        """

        def use() -> None:
            self._served.use()
            self._on_used()

        return await self._ask(lambda: self._if_idle(use))

    async def sleep(self, level: SleepLevel) -> bool:
        """Free the weights' memory, unless a request is open; return whether it was freed.

        The memory of the KV cache is kept, because network devices of peers may have mapped it.
        """
        return await self._ask(
            lambda: self._if_idle(lambda: self._served.sleep(level, keeps_kv_memory=True))
        )

    async def wake(self) -> bool:
        """End a sleep; return False if the caller must first wait for weights and `use` them."""
        return await self._ask(self._served.wake)

    def _if_idle(self, change: Callable[[], None]) -> bool:
        if self._engine.requests or self._engine.step_in_flight:
            return False
        change()
        return True

    def _find(self, source: str) -> Path:
        """Return the path of a source; raises InvalidRequestError if it is not below the root."""
        shown = f"{source!r:.200}"
        if self._root is None:
            raise InvalidRequestError("weights", "this node takes none: it has no --weights-root")
        root = self._root.resolve()
        try:
            path = (root / source).resolve()
            is_there = path.exists()
        except (OSError, ValueError) as error:
            raise InvalidRequestError("weights", f"{shown}: is not a usable path") from error
        if not path.is_relative_to(root):
            raise InvalidRequestError("weights", f"{shown}: leads out of --weights-root")
        if not is_there:
            raise InvalidRequestError("weights", f"{shown}: is not below --weights-root")
        return path
