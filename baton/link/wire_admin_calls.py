"""Convert operators' questions to nodes, and parts of the answers, to protobuf and back."""

from __future__ import annotations

from baton.link import words as link
from baton.v1 import node_pb2
from baton.wire.fields import from_message, to_message


def admin_call_to_proto(call: link.AdminCall) -> node_pb2.RouterMessage:
    return node_pb2.RouterMessage(admin_call=to_message(node_pb2.AdminCall, call))


def admin_call_from_proto(message: node_pb2.AdminCall) -> link.AdminCall:
    return from_message(link.AdminCall, message)


def admin_reply_to_proto(reply: link.AdminReply) -> node_pb2.NodeMessage:
    error = None if reply.error is None else to_message(node_pb2.RequestError, reply.error)
    return node_pb2.NodeMessage(admin_reply=to_message(node_pb2.AdminReply, reply, error=error))


def admin_reply_from_proto(message: node_pb2.AdminReply) -> link.AdminReply:
    has_error = message.HasField("error")
    error = from_message(link.RequestError, message.error) if has_error else None
    return from_message(link.AdminReply, message, error=error)
