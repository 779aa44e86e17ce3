"""NodeCalls: asks nodes on behalf of operators, over the links that the nodes opened.

The router never connects to a node, because a node's address is only the node's claim.
"""

from __future__ import annotations

import asyncio

from baton.api.errors import BatonError, InvalidRequestError, NodeUnavailableError
from baton.link.words import AdminCall
from baton.telemetry.stack_sampler import MAX_SECONDS
from baton.v1 import admin_pb2
from router.fleet.node import Node

TIMEOUT_S = 10.0  # a node answers between two steps of its engine, and a step may be long
_LOAD_S = 50.0  # longer, because the node reads the adapter's files first


class NodeCalls:
    """Asks nodes on behalf of one operator.

    Args:
        operator: the operator's name, for the nodes' audit logs.
        timeout_s: seconds that a node has to answer; for a profile, its duration is added.
    """

    def __init__(self, operator: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._operator = operator
        self._timeout_s = timeout_s

    async def list_requests(self, node: Node) -> admin_pb2.ListRequestsResponse:
        request = admin_pb2.NodeAdminRequest(list_requests=admin_pb2.ListRequestsRequest())
        return (await self._ask(node, request)).list_requests

    async def list_blocks(self, node: Node) -> admin_pb2.ListBlocksResponse:
        return (await self.list_ledgers(node)).list_blocks

    async def list_ledgers(self, node: Node) -> admin_pb2.NodeAdminResponse:
        """Return the ledgers of a node's KV cache and, if any, of its memory for encodings."""
        request = admin_pb2.NodeAdminRequest(list_blocks=admin_pb2.ListBlocksRequest())
        return await self._ask(node, request)

    async def flush_cache(self, node: Node) -> admin_pb2.FlushCacheResponse:
        request = admin_pb2.NodeAdminRequest(flush_cache=admin_pb2.FlushCacheRequest())
        return (await self._ask(node, request)).flush_cache

    async def set_log_level(
        self, node: Node, level: str, module: str = ""
    ) -> admin_pb2.SetLogLevelResponse:
        change = admin_pb2.SetLogLevelRequest(level=level, module=module)
        request = admin_pb2.NodeAdminRequest(set_log_level=change)
        return (await self._ask(node, request)).set_log_level

    async def profile(self, node: Node, seconds: float) -> admin_pb2.ProfileResponse:
        request = admin_pb2.NodeAdminRequest(profile=admin_pb2.ProfileRequest(seconds=seconds))
        return (await self._ask(node, request, more_s=seconds)).profile

    async def load_adapter(
        self, node: Node, digest: str, source: str, *, pinned: bool = False
    ) -> admin_pb2.AdaptersDescription:
        """Load an adapter from a folder below a node's adapter root; return the node's adapters."""
        load = admin_pb2.LoadAdapterRequest(digest=digest, source=source, pinned=pinned)
        request = admin_pb2.NodeAdminRequest(load_adapter=load)
        answer = await self._ask(node, request, more_s=_LOAD_S)
        return answer.load_adapter

    async def unload_adapter(self, node: Node, digest: str) -> admin_pb2.AdaptersDescription:
        """Tell a node to refuse new requests for an adapter and unload it; return its adapters."""
        unload = admin_pb2.UnloadAdapterRequest(digest=digest)
        request = admin_pb2.NodeAdminRequest(unload_adapter=unload)
        return (await self._ask(node, request)).unload_adapter

    async def list_adapters(self, node: Node) -> admin_pb2.AdaptersDescription:
        request = admin_pb2.NodeAdminRequest(list_adapters=admin_pb2.ListAdaptersRequest())
        return (await self._ask(node, request)).list_adapters

    async def change_weights(
        self, node: Node, request: admin_pb2.WeightsRequest
    ) -> admin_pb2.WeightsDescription:
        """Begin a change of a node's weights; return the node's state without waiting."""
        return (await self._ask(node, admin_pb2.NodeAdminRequest(weights=request))).weights

    async def _ask(
        self, node: Node, request: admin_pb2.NodeAdminRequest, *, more_s: float = 0.0
    ) -> admin_pb2.NodeAdminResponse:
        """Send one request to a node and return the answer.

        Args:
            more_s: seconds that the node gets in addition to ``timeout_s``.

        Raises:
            NodeUnavailableError: the node does not answer, or its answer is not the answer to this
                kind of request.
            InvalidRequestError: the node rejects a value of the request.
        """
        timeout_s = self._timeout_s + min(max(more_s, 0.0), MAX_SECONDS)
        call_id, answer = node.replies.open_call()
        try:
            node.send(AdminCall(call_id, request.SerializeToString(), timeout_s, self._operator))
            async with asyncio.timeout(timeout_s):
                response = await answer
        except TimeoutError:
            raise NodeUnavailableError(
                f"{node.name}: did not answer within {timeout_s:g} s"
            ) from None
        except InvalidRequestError:
            raise
        except BatonError as error:
            raise NodeUnavailableError(f"{node.name}: {error}") from None
        finally:
            node.replies.close_call(call_id)
        if response.WhichOneof("response") != request.WhichOneof("request"):
            raise NodeUnavailableError(f"{node.name}: answered something else")
        return response
