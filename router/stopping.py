"""Stops a router: it reports not ready, serves on, refuses new requests, ends open ones, closes.

        serving -> not ready, serves on (drain_delay_s, so that load balancers notice)
                -> refuses new requests (until all have ended, at most drain_timeout_s)
                -> ends remaining requests with an error, and closes

A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from baton.serving.rpc import RpcServer
from router.calls.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

WHY = "the router is stopping"
LAST_WORDS_S = 1.0  # seconds that clients of remaining requests have to receive the error
_POLL_INTERVAL_S = 0.02


class HttpApi(Protocol):
    """Parts of the optional HTTP API that `stop_router` and the overload signals use."""

    @property
    def num_at_work(self) -> int:
        """Number of requests in progress, whose answers are not completely written."""

    @property
    def share_at_work(self) -> float:
        """Number of connections with a request in progress, divided by the allowed connections."""

    def announce_stop(self) -> None:
        """Make ``/ready`` answer no, and close each connection after its next answer."""

    async def stop(self) -> None:
        """Accept no new connections, and end the connections that exist."""


async def stop_router(
    dispatchers: Sequence[Dispatcher],
    servers: Iterable[RpcServer],
    http: HttpApi | None,
    *,
    delay_s: float,
    timeout_s: float,
) -> None:
    """Stop a router; return when everything is closed.

    Args:
        dispatchers: dispatcher of each base model.
        servers: the gRPC servers.
        http: the HTTP API; None: it is disabled.
        delay_s: seconds to serve on while not ready, so that load balancers notice.
        timeout_s: seconds that open requests have to end by themselves.
    """
    servers = list(servers)
    logger.info("stopping: not ready, serves on for %g s", delay_s)
    if http is not None:
        http.announce_stop()
    await asyncio.gather(*(server.set_serving(False) for server in servers))
    await asyncio.sleep(delay_s)

    def num_open() -> int:
        num_calls = sum(dispatcher.num_open for dispatcher in dispatchers)
        return num_calls + (http.num_at_work if http is not None else 0)

    for dispatcher in dispatchers:
        dispatcher.refuse_new(WHY)
    if num_open():
        logger.info("stopping: %d open requests have %g s to end", num_open(), timeout_s)
    await _until_none(num_open, timeout_s)
    await asyncio.gather(
        *(server.stop(LAST_WORDS_S) for server in servers),
        *([http.stop()] if http is not None else []),
        *map(_end_calls, dispatchers),
    )


async def _end_calls(dispatcher: Dispatcher) -> None:
    """End a base model's remaining calls with an error, and end the links of its nodes."""
    dispatcher.stop(WHY)
    await _until_none(lambda: dispatcher.num_open, LAST_WORDS_S / 2)
    for node in dispatcher.pool.nodes:
        node.hang_up()


async def _until_none(number: Callable[[], int], timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while number() and time.monotonic() < give_up_at:  # noqa: ASYNC110  # counts set no event
        await asyncio.sleep(_POLL_INTERVAL_S)
