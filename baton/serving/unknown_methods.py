"""Answer calls of unknown gRPC methods outside gRPC's loop, which accepts all calls.

Since grpcio 1.84 this loop decodes the name of an unknown method. A name that is not UTF-8 raises
an error that ends the loop, and with it the server: one call by anybody could stop a router or
node. This module answers calls of unknown methods without decoding their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

# Type of a function that answers a call, given the call's context.
_Refuse = Callable[[Any], Awaitable[None]]
_HOOK = "_make_request_call_future"


class _Server(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """A gRPC server whose loop gets only calls of registered methods."""

    refuse: _Refuse

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        if method is not None:
            future: asyncio.Future[Any] = super()._make_request_call_future(method)
            return future
        return asyncio.get_running_loop().create_task(self._refuse_calls())

    async def _refuse_calls(self) -> None:
        """Refuse every call of an unknown method; raises gRPC's error when gRPC shuts down."""
        refusing: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            task = asyncio.create_task(self._refuse_call(call))
            refusing.add(task)
            task.add_done_callback(refusing.discard)

    async def _refuse_call(self, call: Any) -> None:
        context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
        # The client may be gone, or the server may be stopping.
        with contextlib.suppress(grpc.aio.BaseError):
            await self.refuse(context)


def make_server(
    interceptor: grpc.aio.ServerInterceptor,  # type: ignore[type-arg]  # generic in stubs only
    refuse: _Refuse,
    options: Sequence[tuple[str, Any]],
) -> grpc.aio.Server:
    """Make a server that refuses all methods except registered ones.

    Args:
        interceptor: interceptor of every call of a registered method.
        refuse: answers calls of all other methods.
        options: channel arguments.
    """
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    if hasattr(cygrpc.AioServer, _HOOK):  # older versions decode names where errors do no harm
        loop = cygrpc.get_working_loop()
        guarded = _Server(loop, None, (), (interceptor,), tuple(options), None)
        guarded.refuse = refuse
        server._server = guarded  # type: ignore[attr-defined]
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_odd_header)
    return server


def _is_no_odd_header(record: logging.LogRecord) -> bool:
    """Return False for log records of gRPC about headers that are not UTF-8, to drop them.

    A client could cause millions of these tracebacks.
    """
    return not str(record.msg).startswith("Invalid encoding on")
