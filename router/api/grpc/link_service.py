"""NodeLink service: the router's end of each node's stream; messages become calls on the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias

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
from router.fleet.node import Node
from router.fleet.node_pool import NodePool

logger = logging.getLogger(__name__)

_LINK = "/baton.v1.NodeLink/Link"
REGISTER_TIMEOUT_S = 10.0
# Far more than a node that listens ever has before it.
MAX_QUEUED_COMMANDS = 50_000

_Messages: TypeAlias = AsyncIterator[node_pb2.NodeMessage | Unread]


class NodeLinkService(node_pb2_grpc.NodeLinkServicer):
    """Serves `Link`: one call per joined node, as long as the node lives."""

    def __init__(self, pool: NodePool, access: Access | None = None) -> None:
        """Args: access: hears who joined, left or was refused."""
        self._pool = pool
        self._access = access or Access()
        self._long = LongMessages()
        self._one_piece = asyncio.Lock()  # in each turn of the loop, of all links

    async def Link(  # gRPC's naming
        self,
        request_iterator: _Messages,
        context: Context,
    ) -> AsyncIterator[node_pb2.RouterMessage]:
        """The first message registers; then events come in and commands go out."""
        first = await _first(request_iterator)
        registration = (
            wire.registration_from_proto(first.register)
            if first is not None and first.WhichOneof("message") == "register"
            else None
        )
        if registration is None:
            yield registered("the first message must be a registration with a known role")
            return
        refusal = self._refusal(context, registration) or self._pool.refusal(registration)
        if refusal:
            self._note(AuditKind.REFUSED, context, registration, refusal)
            yield registered(refusal)
            return
        obstacle = self._pool.gate.obstacle(registration, self._pool.nodes, context.address)
        if obstacle:
            self._note(AuditKind.REFUSED, context, registration, obstacle)
            yield registered(obstacle, may_retry=True)
            return
        outgoing: asyncio.Queue[RouterCommand | None] = asyncio.Queue()

        call = asyncio.current_task()
        assert call is not None

        def send(command: RouterCommand) -> None:
            outgoing.put_nowait(command)
            if outgoing.qsize() > MAX_QUEUED_COMMANDS:  # it talks and does not listen
                logger.warning("hung up on %s, which reads nothing of its link", node.name)
                while not outgoing.empty():
                    outgoing.get_nowait()
                call.cancel()  # the call waits for its reading, and for nothing else

        del first  # it would be kept as long as the link
        node = Node(
            registration,
            send,
            hang_up=lambda: outgoing.put_nowait(None),
            address=context.address,
        )
        self._pool.add(node)
        self._note(AuditKind.JOINED, context, registration)
        reader = asyncio.create_task(self._read(node, request_iterator, outgoing))
        try:
            yield registered("", self._pool.router_id)
            while (command := await outgoing.get()) is not None:
                message = write_command(command, node.name)
                if isinstance(message, node_pb2.RouterMessage):
                    yield message
                elif message is not None:
                    node.deliver(message)
        finally:
            self._pool.remove(node)
            self._note(AuditKind.LEFT, context, registration)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def _refusal(self, context: Context, registration: NodeRegistration) -> str:
        """Why a node may not join as what it says, however it may; empty: it may."""
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
        node: Node,
        messages: _Messages,
        outgoing: asyncio.Queue[RouterCommand | None],
    ) -> None:
        try:
            async for message in messages:
                if isinstance(message, Unread):
                    problem = await self._take_long(node, message)
                else:
                    problem = self._take(node, message)
                if problem:
                    self._pool.hang_up(node, problem)
                    return
        except InvalidRequestError as error:  # it could not be read
            self._pool.hang_up(node, str(error))
        except Exception:  # else nobody would hear of it: a link just ends
            logger.exception("the link of %s broke by what it said", node.name)
        finally:
            self._pool.remove(node)
            outgoing.put_nowait(None)

    def _take(self, node: Node, message: node_pb2.NodeMessage) -> str:
        """Take what a message says; returns why it is not to be read, if it is not."""
        event, problem = read_event(message)
        if event is not None:
            self._pool.take(node, event)
        return problem

    async def _take_long(self, node: Node, message: Unread) -> str:
        pieces, problem = await self._long.read(node, message, self._pool.vocabulary)
        for piece in pieces:
            async with self._one_piece:
                self._pool.take(node, piece, is_checked=True)
                await asyncio.sleep(0)  # others' turn
        return problem


async def _first(messages: _Messages) -> node_pb2.NodeMessage | None:
    """None when nothing comes, or not in time."""
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            message = await anext(messages, None)
    except TimeoutError:
        return None
    return read_registration(message) if isinstance(message, Unread) else message
