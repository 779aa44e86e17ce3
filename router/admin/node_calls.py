"""NodeCalls: the router asks nodes what operators ask it, so that those need to reach only it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from baton.client_messages import trailers_of
from baton.error_details import error_from_trailers
from baton.errors import BatonError, InvalidRequestError, NodeUnavailableError
from baton.link import NodeRegistration
from baton.rpc import bearer, open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc

TIMEOUT_S = 10.0  # a node answers between two steps


class NodeCalls:
    """Calls of `NodeAdmin`, a channel each: they are rare.

    Args:
        token: that nodes want to see; empty: none.
    """

    def __init__(self, token: str = "") -> None:
        self._metadata = bearer(token)

    async def list_requests(self, node: NodeRegistration) -> admin_pb2.ListRequestsResponse:
        response: admin_pb2.ListRequestsResponse = await self._ask(
            node, "ListRequests", admin_pb2.ListRequestsRequest()
        )
        return response

    async def list_blocks(self, node: NodeRegistration) -> admin_pb2.ListBlocksResponse:
        response: admin_pb2.ListBlocksResponse = await self._ask(
            node, "ListBlocks", admin_pb2.ListBlocksRequest()
        )
        return response

    async def flush_cache(self, node: NodeRegistration) -> admin_pb2.FlushCacheResponse:
        response: admin_pb2.FlushCacheResponse = await self._ask(
            node, "FlushCache", admin_pb2.FlushCacheRequest()
        )
        return response

    async def set_log_level(
        self, node: NodeRegistration, level: str
    ) -> admin_pb2.SetLogLevelResponse:
        response: admin_pb2.SetLogLevelResponse = await self._ask(
            node, "SetLogLevel", admin_pb2.SetLogLevelRequest(level=level)
        )
        return response

    async def profile(self, node: NodeRegistration, seconds: float) -> admin_pb2.ProfileResponse:
        request = admin_pb2.ProfileRequest(seconds=seconds)
        response: admin_pb2.ProfileResponse = await self._ask(
            node, "Profile", request, TIMEOUT_S + seconds
        )
        return response

    async def _ask(
        self, node: NodeRegistration, method: str, request: Any, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """One call.

        Raises:
            NodeUnavailableError: the node cannot be reached, or answers nothing.
            InvalidRequestError: the node refuses a value.
            BatonError: it refuses the call.
        """
        async with open_channel(node.address) as channel:
            stub = admin_pb2_grpc.NodeAdminStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                return await getattr(stub, method)(
                    request, timeout=timeout_s, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                raise _error(node, error) from None


def _error(node: NodeRegistration, error: grpc.aio.AioRpcError) -> BatonError:
    code, details = error.code(), error.details() or ""
    ours = error_from_trailers(details, trailers_of(error))
    if isinstance(ours, InvalidRequestError):
        return ours
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return NodeUnavailableError(
            f"{node.node_name}: the router cannot reach it at {node.address} ({code.name})"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return NodeUnavailableError(
            f"{node.node_name}: its --admin-token is not the one of the router"
        )
    return NodeUnavailableError(f"{node.node_name}: {details or code.name}")
