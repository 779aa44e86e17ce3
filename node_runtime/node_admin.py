"""NodeAdmin: answers operators' questions, which routers pass on to the node over links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from baton.access.access import Access
from baton.access.audit_log import AuditKind
from baton.access.identity import Principal
from baton.api.errors import InvalidRequestError
from baton.link import wire, wire_admin, wire_ledger
from baton.link.admin_answers import PART_BYTES
from baton.link.words import AdminCall, NodeBeat, RequestView
from baton.telemetry.ledger import Ledger
from baton.v1 import admin_pb2

logger = logging.getLogger(__name__)

ENGINE_THREAD = "engine"
_CHANGES = ("flush_cache", "set_log_level", "profile", "load_adapter", "unload_adapter", "weights")


class AskedNode(Protocol):
    """The part of a node from which operators' questions are answered; see `NodeProgram`."""

    def beat(self) -> NodeBeat: ...
    def requests(self) -> Iterable[RequestView]: ...
    def ledger(self) -> Future[Ledger]: ...
    def flush_prefix_cache(self) -> Future[int]: ...


class ChangedAdapters(Protocol):
    """Loads and unloads a node's adapters, and returns all in memory; see `NodeAdapters`."""

    async def load(
        self, digest: str, source: str, *, pinned: bool
    ) -> admin_pb2.AdaptersDescription: ...
    async def unload(self, digest: str) -> admin_pb2.AdaptersDescription: ...
    async def describe(self) -> admin_pb2.AdaptersDescription: ...


class ChangedWeights(Protocol):
    """Changes a node's weights; see `WeightsAdmin`."""

    async def answer(self, request: admin_pb2.WeightsRequest) -> admin_pb2.WeightsDescription: ...


class NodeAdmin:
    """Answers `NodeAdminRequest` messages of operators.

    Args:
        num_blocks: the node's number of KV blocks.
        access: has the audit log, to which operators' changes are written.
        adapters: changes the node's adapters; None: the node does not compute adapters.
        weights: changes the node's weights; None: the node has no weights.
    """

    def __init__(
        self,
        node: AskedNode,
        num_blocks: int,
        access: Access | None = None,
        adapters: ChangedAdapters | None = None,
        weights: ChangedWeights | None = None,
    ) -> None:
        self._node, self._weights = node, weights
        self._adapters = adapters
        self._num_blocks = num_blocks
        self._access = access or Access()

    async def answer(self, call: AdminCall) -> Sequence[bytes]:
        """Return `NodeAdminResponse`s, which together are the answer; raises BatonError."""
        try:
            request = admin_pb2.NodeAdminRequest.FromString(call.request)
        except DecodeError:
            raise InvalidRequestError("request", "is no admin request") from None
        kind = request.WhichOneof("request") or ""
        if kind:
            self._note(call, kind, request)
        match kind:
            case "list_requests":
                response = admin_pb2.NodeAdminResponse(list_requests=self._list_requests())
            case "list_blocks":
                ledger = await asyncio.wrap_future(self._node.ledger())
                # Use a thread, because a ledger may be large, and beats and tokens must not wait
                # for it.
                return await asyncio.to_thread(_ledger_parts, ledger)
            case "flush_cache":
                response = admin_pb2.NodeAdminResponse(flush_cache=await self._flush_cache())
            case "set_log_level":
                levels = wire_admin.set_log_level(request.set_log_level)
                response = admin_pb2.NodeAdminResponse(set_log_level=levels)
            case "profile":
                profiled = await wire_admin.profile(ENGINE_THREAD, request.profile.seconds)
                response = admin_pb2.NodeAdminResponse(profile=profiled)
            case "load_adapter" | "unload_adapter" | "list_adapters":
                response = admin_pb2.NodeAdminResponse()
                getattr(response, kind).CopyFrom(await self._change_adapters(request))
            case "weights":
                if self._weights is None:
                    raise InvalidRequestError("weights", "this node has none to change")
                found = await self._weights.answer(request.weights)
                response = admin_pb2.NodeAdminResponse(weights=found)
            case _:
                raise InvalidRequestError("request", "is not known to this version")
        return [response.SerializeToString()]

    def _list_requests(self) -> admin_pb2.ListRequestsResponse:
        """Return open requests with status and transfer state, and figures of the cache."""
        beat = self._node.beat()
        return admin_pb2.ListRequestsResponse(
            requests=[wire.request_view_to_proto(view) for view in self._node.requests()],
            num_free_blocks=beat.num_free_blocks,
            num_blocks=self._num_blocks,
            num_quarantined_blocks=beat.num_quarantined_blocks,
        )

    async def _flush_cache(self) -> admin_pb2.FlushCacheResponse:
        """Drop all cached prefixes; requests in progress keep their blocks."""
        num_prefixes = await asyncio.wrap_future(self._node.flush_prefix_cache())
        logger.info("flush-cache: %d prefixes", num_prefixes)
        return admin_pb2.FlushCacheResponse(num_prefixes=num_prefixes)

    async def _change_adapters(
        self, request: admin_pb2.NodeAdminRequest
    ) -> admin_pb2.AdaptersDescription:
        """Load, unload or list adapters; return those in memory afterwards."""
        adapters = self._adapters
        if adapters is None:
            raise InvalidRequestError("adapter", "this node computes no adapters")
        match request.WhichOneof("request"):
            case "load_adapter":
                asked = request.load_adapter
                return await adapters.load(asked.digest, asked.source, pinned=asked.pinned)
            case "unload_adapter":
                return await adapters.unload(request.unload_adapter.digest)
            case _:
                return await adapters.describe()

    def _note(self, call: AdminCall, kind: str, request: admin_pb2.NodeAdminRequest) -> None:
        arguments = MessageToDict(getattr(request, kind), preserving_proto_field_name=True)
        describes = request.weights.action == admin_pb2.WeightsAction.WEIGHTS_ACTION_DESCRIBE
        is_change = kind in _CHANGES and not describes
        event = AuditKind.CHANGED if is_change else AuditKind.LOOKED
        self._access.note(event, Principal(name=call.operator), "", kind, arguments)


def _ledger_parts(ledger: Ledger) -> Sequence[bytes]:
    """Divide the ledger into small messages: encoding a large one would block all threads."""
    answers = wire_ledger.ledger_to_answers(ledger, PART_BYTES)
    return [answer.SerializeToString() for answer in answers]
