"""OverloadGate: refuses calls of one gRPC service before their messages are read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton.errors import OverloadedError
from baton.rpc import Context, Handler
from router.overload import Overload


class OverloadGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Guards one service of a server; all others go on.

    Args:
        service: its full name.
        overload: says when to refuse.
    """

    def __init__(self, service: str, overload: Overload) -> None:
        self._prefix = f"/{service}/"
        self._overload = overload

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method.startswith(self._prefix):
            try:
                self._overload.check()
            except OverloadedError as error:
                return _refuse_with(error)
        return await continuation(handler_call_details)


def _refuse_with(error: OverloadedError) -> Handler:
    async def refuse(requests: object, context: Context) -> AsyncIterator[Any]:
        raise error
        yield  # what makes it a generator

    # Of streams in both directions, as only these begin before a message has been read.
    return grpc.stream_stream_rpc_method_handler(refuse)
