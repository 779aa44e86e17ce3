"""The messages of the router's end of a link. Has no stream, task or clock.

`NodePool`, `Node` and `JoinGate` of the router act on these messages.
"""

from __future__ import annotations

import logging

from baton.link import wire
from baton.link.message_cuts import parts_problem
from baton.link.words import (
    PROTOCOL,
    DecodeCommand,
    NodeEvent,
    PrefillCommand,
    RequestDelta,
    RequestError,
    RouterCommand,
    failed_delta,
)
from baton.serving.rpc import MAX_MESSAGE_BYTES
from baton.v1 import node_pb2

logger = logging.getLogger(__name__)


def registered(
    problem: str, router_id: str = "", *, may_retry: bool = False, intervals_at_rest: int = 0
) -> node_pb2.RouterMessage:
    """Return the answer to a node's registration.

    Args:
        problem: why the router refuses the node; empty: the node joins.
        intervals_at_rest: beat intervals between two beats of the node at rest; 0: the default.
    """
    answer = node_pb2.Registered(
        problem=problem,
        router_id=router_id,
        may_retry=may_retry,
        protocol=PROTOCOL,
        batches_peers=not problem,
        intervals_at_rest=intervals_at_rest,
    )
    return node_pb2.RouterMessage(registered=answer)


def read_event(message: node_pb2.NodeMessage) -> tuple[NodeEvent | None, str]:
    """Return the event of a node's message, and why the link must end.

    The event is None if its kind is unknown. The reason is empty if the link continues.
    """
    problem = parts_problem(message)
    return None if problem else wire.node_event_from_proto(message), problem


def write_command(
    command: RouterCommand, node_name: str
) -> node_pb2.RouterMessage | RequestDelta | None:
    """Return the message of a command to a node.

    A command that no message can hold ends its request but not the link. In that case, returns the
    delta that ends the request, or None if the command belongs to no request.
    """
    try:
        message = wire.command_to_proto(command)
        if message.ByteSize() <= MAX_MESSAGE_BYTES:
            return message
        logger.error("dropped a command to %s: %d bytes", node_name, message.ByteSize())
    except ValueError as error:
        logger.error("dropped a command to %s that cannot be sent: %s", node_name, error)
    if not isinstance(command, PrefillCommand | DecodeCommand):
        return None
    problem = RequestError("INVALID_ARGUMENT", "request: cannot be sent to a node")
    return failed_delta(command.request_id, command.epoch, problem)
