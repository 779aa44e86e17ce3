"""How a router stops: it says so, serves on for a while, takes nothing new, ends, closes.

    serving -> not ready, serves on (drain_delay_s: who sends it requests comes to know)
            -> takes no new requests (until all have ended, at most drain_timeout_s)
            -> tells the clients of the others, and closes

A second signal ends the process at once, wherever it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.serving.rpc import RpcServer
from router.calls.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

WHY = "the router is stopping"
LAST_WORDS_S = 1.0  # to tell the clients of requests that do not end by themselves
_POLL_INTERVAL_S = 0.02


class HttpApi(Protocol):
    """What the rest of the router asks of the HTTP API, which is not always there."""

    @property
    def num_at_work(self) -> int:
        """Requests whose answers are not written yet."""

    @property
    def share_at_work(self) -> float:
        """The same, of all connections that there may be."""

    def announce_stop(self) -> None:
        """Be ready no more, and keep no connection open behind its next answer."""

    async def stop(self) -> None:
        """Take no new connections, and end those that there are."""


async def stop_router(
    dispatcher: Dispatcher,
    servers: Iterable[RpcServer],
    http: HttpApi | None,
    *,
    delay_s: float,
    timeout_s: float,
) -> None:
    """Go through all of it; returns when everything is closed.

    Args:
        delay_s: not ready, but serving. A load balancer takes seconds to hear of it.
        timeout_s: for open requests to end by themselves.
    """
    servers = list(servers)
    logger.info("stopping: not ready, serves on for %g s", delay_s)
    if http is not None:
        http.announce_stop()
    await asyncio.gather(*(server.set_serving(False) for server in servers))
    await asyncio.sleep(delay_s)

    def num_open() -> int:
        return dispatcher.num_open + (http.num_at_work if http is not None else 0)

    dispatcher.refuse_new(WHY)
    if num_open():
        logger.info("stopping: %d open requests have %g s to end", num_open(), timeout_s)
    await _until_none(num_open, timeout_s)
    await asyncio.gather(
        *(server.stop(LAST_WORDS_S) for server in servers),
        *([http.stop()] if http is not None else []),
        _end_calls(dispatcher),
    )


async def _end_calls(dispatcher: Dispatcher) -> None:
    """End the calls that are still open, and let the nodes go."""
    dispatcher.stop(WHY)
    await _until_none(lambda: dispatcher.num_open, LAST_WORDS_S / 2)
    for node in dispatcher.pool.nodes:
        node.hang_up()


async def _until_none(number: Callable[[], int], timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while number() and time.monotonic() < give_up_at:  # noqa: ASYNC110  # once in a life
        await asyncio.sleep(_POLL_INTERVAL_S)
