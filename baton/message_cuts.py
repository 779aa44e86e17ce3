"""Message cuts: what a node says in one step, in messages that a link carries.

A message that is too long does not fail by itself: it breaks the link, and with it every request
of the node. So steps are cut between requests; what one alone has too much of ends it.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.v1 import node_pb2

# Half of what a router takes in one message (`baton.rpc.MAX_CLIENT_MESSAGE_BYTES`).
MAX_LINK_MESSAGE_BYTES = 4 * 2**20


def cut_message(
    message: node_pb2.NodeMessage, max_bytes: int = MAX_LINK_MESSAGE_BYTES
) -> Iterator[node_pb2.NodeMessage]:
    """Give the message, or, if it is too long, its deltas in several, in their order."""
    if message.ByteSize() <= max_bytes or message.WhichOneof("message") != "deltas":
        yield message
        return
    step = message.deltas
    rows = node_pb2.StepDeltas(
        epochs=step.epochs, output_indexes=step.output_indexes, token_ids=step.token_ids
    )
    part, num_bytes = rows, rows.ByteSize()
    for delta in step.deltas:
        delta_bytes = delta.ByteSize()
        if delta_bytes > max_bytes:
            delta = _too_long(delta, delta_bytes)
            delta_bytes = delta.ByteSize()
        if num_bytes and num_bytes + delta_bytes > max_bytes:
            yield node_pb2.NodeMessage(deltas=part)
            part, num_bytes = node_pb2.StepDeltas(), 0
        part.deltas.append(delta)
        num_bytes += delta_bytes
    yield node_pb2.NodeMessage(deltas=part)


def _too_long(delta: node_pb2.RequestDelta, num_bytes: int) -> node_pb2.RequestDelta:
    """The request's end; another node would say as much."""
    problem = f"logprobs: one step has {num_bytes} bytes of them, more than a message holds"
    error = node_pb2.RequestError(code="INVALID_ARGUMENT", message=problem)
    return node_pb2.RequestDelta(request_id=delta.request_id, epoch=delta.epoch, error=error)
