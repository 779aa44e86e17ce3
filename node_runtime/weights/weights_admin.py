"""WeightsAdmin: answers operators who change a node's weights, and makes these changes.

    serving ──load──> loading ──> loaded ──use──> changing ──> serving
    serving ──sleep──> changing ──> asleep ──wake──> waking ──> serving

While a node changes its weights, no router sends requests to it: the node drains, leaves all
routers, and joins again under its new identity, as a restarted node does. So a router never pairs
nodes whose weights have different versions. A sleeping node stays drained. Only one change runs at
a time. Used on the node's asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

from baton.api.changes import SleepLevel, WhenOpen, read_choice
from baton.api.errors import BatonError, InvalidRequestError
from baton.link.drain import Drain
from baton.link.words import NodeRegistration
from baton.v1 import admin_pb2

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ANSWER_S = 0.2  # seconds for the answer to the operator, before the links end
_KNOWN_WITHIN_S = 2.0  # seconds within which every living router learns of a drain


class WeightsState(Enum):
    """States of a node's weights (see top of file)."""

    SERVING = "serving"
    LOADING = "loading"
    LOADED = "loaded"
    CHANGING = "changing"
    ASLEEP = "asleep"
    WAKING = "waking"


class EngineWeights(Protocol):
    """Interface of the object that changes the engine's weights; see `NodeWeights`."""

    @property
    def digest(self) -> str: ...
    @property
    def is_asleep(self) -> bool: ...
    async def begin(self, source: str) -> str: ...
    async def is_ready(self) -> bool: ...
    async def drop(self) -> None: ...
    async def use(self) -> bool: ...
    async def sleep(self, level: SleepLevel) -> bool: ...
    async def wake(self) -> bool: ...


class Links(Protocol):
    """The node's links to routers; see `RouterLinks`."""

    @property
    def all_know_drain(self) -> bool: ...
    async def leave(self) -> None: ...
    def join(self, registration: NodeRegistration) -> None: ...


class WeightsAdmin:
    """Changes the weights of one node as operators ask.

    Args:
        weights: changes the weights in the engine.
        drain: whether the node serves, drains or is drained.
        links: returns the node's links.
        register: returns the node's registration, with its current identity.
    """

    def __init__(
        self,
        weights: EngineWeights,
        drain: Drain,
        links: Callable[[], Links],
        register: Callable[[], NodeRegistration],
    ) -> None:
        self._weights, self._drain, self._links, self._register = weights, drain, links, register
        self._state = WeightsState.SERVING
        self._loaded = self._problem = ""
        self._serves_after = True  # whether the node served before the change
        self._is_final = False  # whether the change can no longer be given up
        self._task: asyncio.Task[None] | None = None

    async def answer(self, request: admin_pb2.WeightsRequest) -> admin_pb2.WeightsDescription:
        """Begin the change that an operator requests, and return the state at once.

        Raises InvalidRequestError if a value is wrong, or the state does not allow it.
        """
        action = admin_pb2.WeightsAction
        match request.action:
            case action.WEIGHTS_ACTION_LOAD:
                self._expect(WeightsState.SERVING, WeightsState.ASLEEP)
                self._start(WeightsState.LOADING, self._load(request.source))
            case action.WEIGHTS_ACTION_USE:
                self._expect(WeightsState.LOADED)
                how = read_choice(WhenOpen, "when", request.when or WhenOpen.DRAIN.value)
                self._start(WeightsState.CHANGING, self._use(how))
            case action.WEIGHTS_ACTION_DROP:
                await self._drop()
            case action.WEIGHTS_ACTION_SLEEP:
                self._expect(WeightsState.SERVING)
                level = read_choice(SleepLevel, "level", request.level or SleepLevel.DROPPED.value)
                how = read_choice(WhenOpen, "when", request.when or WhenOpen.DRAIN.value)
                self._start(WeightsState.CHANGING, self._sleep(level, how))
            case action.WEIGHTS_ACTION_WAKE:
                self._expect(WeightsState.ASLEEP)
                self._start(WeightsState.WAKING, self._wake())
            case action.WEIGHTS_ACTION_DESCRIBE:
                pass
            case _:
                raise InvalidRequestError("action", "is not known to this version")
        return self.describe()

    def describe(self) -> admin_pb2.WeightsDescription:
        """Return the state, the versions of weights in use and loaded, and the last problem."""
        return admin_pb2.WeightsDescription(
            digest=self._weights.digest,
            loaded=self._loaded,
            state=self._state.value,
            problem=self._problem,
        )

    # ------------------------------------------------------------------ changes

    def _expect(self, *states: WeightsState) -> None:
        if self._state not in states:
            known = " or ".join(state.value for state in states)
            raise InvalidRequestError(
                "weights", f"the node must be {known} for that, it is {self._state.value}"
            )

    def _start(self, state: WeightsState, change: Coroutine[Any, Any, None]) -> None:
        self._state, self._problem, self._is_final = state, "", False
        self._task = asyncio.create_task(self._run(change))

    async def _run(self, change: Coroutine[Any, Any, None]) -> None:
        """Make a change; if it fails, record the reason and restore the old state."""
        try:
            await change
        except BatonError as error:
            logger.warning("weights: %s", error)
            self._problem = str(error)
            await self._go_back()

    async def _go_back(self) -> None:
        """Drop new weights; then serve with the old weights, or stay asleep."""
        self._loaded = ""
        await self._weights.drop()
        if self._weights.is_asleep:
            self._state = WeightsState.ASLEEP
        else:
            self._serve()

    async def _load(self, source: str) -> None:
        self._loaded = await self._weights.begin(source)
        await self._until(self._weights.is_ready)
        self._state = WeightsState.LOADED

    async def _use(self, how: WhenOpen) -> None:
        """Leave all routers, compute with the new weights, and join again."""
        await asyncio.sleep(_ANSWER_S)
        await self._rest(how)
        self._is_final = True
        await self._links().leave()
        try:
            await self._until(self._weights.use)
        finally:
            self._links().join(self._register())
        self._loaded = ""
        self._serve()

    async def _sleep(self, level: SleepLevel, how: WhenOpen) -> None:
        await self._rest(how)
        self._is_final = True
        await self._until(lambda: self._weights.sleep(level))
        self._state = WeightsState.ASLEEP

    async def _wake(self) -> None:
        if not await self._weights.wake():
            await self._until(self._weights.is_ready)
            await self._until(self._weights.use)
        self._serve()

    async def _drop(self) -> None:
        """Drop new weights, or give up a change that has not taken effect yet."""
        self._expect(WeightsState.LOADING, WeightsState.LOADED, WeightsState.CHANGING)
        if self._is_final:
            raise InvalidRequestError("weights", "it is too late: the change is being made")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._go_back()

    async def _rest(self, how: WhenOpen) -> None:
        """Drain the node until no request is open on it.

        If ``how`` is ABORT, leave the routers, which aborts open requests.
        """
        if not self._weights.is_asleep:
            self._serves_after = self._drain.is_serving
        self._drain.begin()
        self._drain.is_locked = True
        if how is WhenOpen.DRAIN:
            await self._drain.drained.wait()
            return
        try:
            async with asyncio.timeout(_KNOWN_WITHIN_S):
                while not self._links().all_know_drain:  # noqa: ASYNC110  # no event tells
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            logger.warning("a router does not know that this node drains")
        await self._links().leave()
        self._links().join(self._register())
        await self._drain.drained.wait()

    def _serve(self) -> None:
        self._drain.is_locked = False
        if self._serves_after:
            self._drain.resume()
        self._state = WeightsState.SERVING

    async def _until(self, condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        while not await condition():  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(_POLL_S)
