"""NodeLink service: the router's end of the links that nodes open; passes messages to pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from typing import Protocol, TypeAlias

from baton.access.access import Access
from baton.access.audit_log import AuditKind
from baton.access.certificates import certificate_identity
from baton.api.errors import InvalidRequestError
from baton.link import wire
from baton.link.router_end import read_event, registered, write_command
from baton.link.words import NodeRegistration, RouterCommand
from baton.serving.call_gate import Context
from baton.v1 import node_pb2, node_pb2_grpc
from baton.wire.reading import Unread
from router.api.grpc.long_messages import LongMessages, read_registration
from router.fleet.join_gate import JoinGate
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

logger = logging.getLogger(__name__)

_LINK = "/baton.v1.NodeLink/Link"
REGISTER_TIMEOUT_S = 10.0
# Maximum number of commands that wait for a node. A node that reads its link has far fewer.
MAX_QUEUED_COMMANDS = 50_000

_Messages: TypeAlias = AsyncIterator[node_pb2.NodeMessage | Unread]


class NodePools(Protocol):
    """The pool, or the pools of several base models, that nodes join."""

    @property
    def gate(self) -> JoinGate:
        """Gate that decides which nodes may join now."""

    @property
    def members(self) -> Collection[Node]:
        """All nodes that have joined, in any order."""

    def refusal(self, registration: NodeRegistration) -> str:
        """Return why this node can never join; empty if it can join now or later."""

    def find_pool(self, registration: NodeRegistration) -> NodePool:
        """Return the pool of the base model that a node serves."""


class NodeLinkService(node_pb2_grpc.NodeLinkServicer):
    """Serves `Link`: one call per joined node, which lasts as long as the node is connected."""

    def __init__(self, pools: NodePools, access: Access | None = None) -> None:
        """Make the service; ``access`` logs which nodes join, leave or are refused."""
        self._pools = pools
        self._access = access or Access()
        self._long = LongMessages()
        # A link holds this lock while it handles one piece of a long message. So one round of the
        # event loop handles only one piece, even if many links have long messages.
        self._one_piece = asyncio.Lock()

    async def Link(  # gRPC prescribes this name
        self,
        request_iterator: _Messages,
        context: Context,
    ) -> AsyncIterator[node_pb2.RouterMessage]:
        """Register the node by its first message; then read its events and send it commands."""
        first = await _first(request_iterator)
        # The node, or this router, was too busy, or the node was stopped: it may try again
        if first is None:
            yield registered(
                f"no registration came within {REGISTER_TIMEOUT_S:g} s", may_retry=True
            )
            return
        registration = (
            wire.registration_from_proto(first.register)
            if first.WhichOneof("message") == "register"
            else None
        )
        if registration is None:
            yield registered("the first message must be a registration with a known role")
            return
        refusal = self._refusal(context, registration) or self._pools.refusal(registration)
        if refusal:
            self._note(AuditKind.REFUSED, context, registration, refusal)
            yield registered(refusal)
            return
        obstacle = self._pools.gate.obstacle(registration, context.address)
        if obstacle:
            self._note(AuditKind.REFUSED, context, registration, obstacle)
            yield registered(obstacle, may_retry=True)
            return
        outgoing: asyncio.Queue[RouterCommand | None] = asyncio.Queue()

        call = asyncio.current_task()
        assert call is not None

        def send(command: RouterCommand) -> None:
            outgoing.put_nowait(command)
            # A node with so many waiting commands sends events but does not read its commands.
            if outgoing.qsize() > MAX_QUEUED_COMMANDS:
                logger.warning("hung up on %s, which reads nothing of its link", node.name)
                while not outgoing.empty():
                    outgoing.get_nowait()
                # This call does nothing but wait for commands, so it can be cancelled safely
                call.cancel()

        del first  # frees the message, which this call would otherwise keep until the link ends
        node = Node(
            registration,
            send,
            hang_up=lambda: outgoing.put_nowait(None),
            address=context.address,
        )
        pool = self._pools.find_pool(registration)
        pool.add_node(node)
        self._note(AuditKind.JOINED, context, registration)
        reader = asyncio.create_task(self._read(pool, node, request_iterator, outgoing))
        try:
            yield registered("", pool.router_id, intervals_at_rest=node.intervals_at_rest)
            while (command := await outgoing.get()) is not None:
                message = write_command(command, node.name)
                if isinstance(message, node_pb2.RouterMessage):
                    yield message
                elif message is not None:
                    node.deliver(message)
        finally:
            pool.remove(node)
            self._note(AuditKind.LEFT, context, registration)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _refusal(self, context: Context, registration: NodeRegistration) -> str:
        """Return why a node's certificate does not allow its role or name; empty: it does."""
        identity = certificate_identity(context)
        if identity is None:
            return ""
        return identity.node_refusal(registration.role.value, registration.node_name)

    def _note(
        self, kind: AuditKind, context: Context, node: NodeRegistration, problem: str = ""
    ) -> None:
        arguments = {
            "node": node.node_name,
            "engine_id": node.engine_id,
            "role": node.role.value,
            "version": node.version,
        }
        who, address = context.principal, context.address
        if problem:
            logger.warning("refused a node at %s: %s", address, problem)
        self._access.note(kind, who, address, _LINK, arguments, problem)

    async def _read(
        self,
        pool: NodePool,
        node: Node,
        messages: _Messages,
        outgoing: asyncio.Queue[RouterCommand | None],
    ) -> None:
        try:
            async for message in messages:
                if isinstance(message, Unread):
                    problem = await self._take_long(pool, node, message)
                else:
                    problem = self._take(pool, node, message)
                if problem:
                    pool.hang_up(node, problem)
                    return
        except InvalidRequestError as error:  # raised for a message that could not be parsed
            pool.hang_up(node, str(error))
        except Exception:  # the link ends, and nobody else reports the cause
            logger.exception("a message of %s broke its link", node.name)
        finally:
            pool.remove(node)
            outgoing.put_nowait(None)

    def _take(self, pool: NodePool, node: Node, message: node_pb2.NodeMessage) -> str:
        """Pass a node's event to the pool; return why the message is invalid, or an empty text."""
        event, problem = read_event(message)
        if event is not None:
            pool.on_event(node, event)
        return problem

    async def _take_long(self, pool: NodePool, node: Node, message: Unread) -> str:
        pieces, problem = await self._long.read(node, message, pool.vocabulary)
        for piece in pieces:
            async with self._one_piece:
                pool.on_event(node, piece, is_checked=True)
                await asyncio.sleep(0)  # let other tasks run before the next piece
        return problem


async def _first(messages: _Messages) -> node_pb2.NodeMessage | None:
    """Return the first message of a link, or None if no message comes in time."""
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            message = await anext(messages, None)
    except TimeoutError:
        return None
    return read_registration(message) if isinstance(message, Unread) else message
