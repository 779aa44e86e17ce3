"""AdminGate: who may call an admin service. Knows the names of calls, and nothing of what they do.

With a token, only who brings it. Without one, everybody who can reach the server may look; change
something only where nobody but this machine can reach it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.rpc import Context, Handler, bears_token

# All else changes something.
_LOOKING = ("Get", "List", "Explain", "Trace", "Audit")


class AdminGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Guards one service of a server.

    Args:
        service: its full name.
        token: that callers must bring as ``authorization: Bearer``; empty: none.
        is_public: whether other machines can reach the server.
    """

    def __init__(self, service: str, token: str, *, is_public: bool) -> None:
        self._prefix = f"/{service}/"
        self._token = token
        self._is_public = is_public

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        refusal = self._refusal(handler_call_details)
        if refusal is None:
            return await continuation(handler_call_details)
        code, problem = refusal

        async def refuse(request: Any, context: Context) -> NoReturn:
            await context.abort(code, problem)

        return grpc.unary_unary_rpc_method_handler(refuse)

    def _refusal(self, details: grpc.HandlerCallDetails) -> tuple[grpc.StatusCode, str] | None:
        method: str = details.method
        if not method.startswith(self._prefix):
            return None
        if self._token:
            if bears_token(details.invocation_metadata, self._token):
                return None
            return grpc.StatusCode.UNAUTHENTICATED, "admin_token: is missing or wrong"
        if self._is_public and not method.removeprefix(self._prefix).startswith(_LOOKING):
            return (
                grpc.StatusCode.PERMISSION_DENIED,
                "admin_token: must be set to change anything through an address that other "
                "machines can reach",
            )
        return None
