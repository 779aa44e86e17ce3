"""Convert operators' questions to nodes, and parts of the answers, to protobuf and back."""

from __future__ import annotations

from baton.link import words as link
from baton.v1 import node_pb2


def admin_call_to_proto(call: link.AdminCall) -> node_pb2.RouterMessage:
    return node_pb2.RouterMessage(
        admin_call=node_pb2.AdminCall(
            call_id=call.call_id,
            request=call.request,
            timeout_s=call.timeout_s,
            operator=call.operator,
        )
    )


def admin_call_from_proto(message: node_pb2.AdminCall) -> link.AdminCall:
    return link.AdminCall(message.call_id, message.request, message.timeout_s, message.operator)


def admin_reply_to_proto(reply: link.AdminReply) -> node_pb2.NodeMessage:
    message = node_pb2.AdminReply(call_id=reply.call_id, part=reply.part, last=reply.last)
    if reply.error is not None:
        message.error.code, message.error.message = reply.error.code, reply.error.message
    return node_pb2.NodeMessage(admin_reply=message)


def admin_reply_from_proto(message: node_pb2.AdminReply) -> link.AdminReply:
    error = None
    if message.HasField("error"):
        error = link.RequestError(message.error.code, message.error.message)
    return link.AdminReply(message.call_id, message.part, message.last, error)
