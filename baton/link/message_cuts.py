"""Message cuts: split a step's deltas into messages that a link can carry.

A message that is too long breaks the link, which ends all requests of the node. So the deltas of a
step are divided over several messages; if one request's delta is too long for a message, the
request is ended. The number of parts (token ids, hashes, rows) in a message is limited too: a part
may take only two bytes on the wire, but the reader makes an object of each part, so a short message
could fill the reader's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from baton.api.outputs import RequestDelta
from baton.api.sampling_params import MAX_LOGPROBS
from baton.v1 import node_pb2

# Half of the length that a router accepts (`baton.serving.rpc.MAX_CLIENT_MESSAGE_BYTES`).
MAX_LINK_MESSAGE_BYTES = 4 * 2**20
MAX_LINK_DELTAS = 2**13
# Maximum number of deltas that a router accepts in a message; nodes split steps and send fewer.
MAX_READ_DELTAS = 2 * MAX_LINK_DELTAS
MAX_PARTS = 2**18  # maximum number of tokens with logprobs, rows, or hashes in a message
# A message with more logprobs is made in a thread, so that the node's event loop is not blocked.
MAX_LOGPROBS_HERE = 512
# Upper bound of a delta's other fields, which count as parts too (`baton.wire.parts`).
_MORE_PARTS = 32


def cut_message(
    message: node_pb2.NodeMessage, max_bytes: int = MAX_LINK_MESSAGE_BYTES
) -> Iterator[node_pb2.NodeMessage]:
    """Yield the message, or if it is too long, several messages with its deltas in order."""
    is_short = message.ByteSize() <= max_bytes and len(message.deltas.deltas) <= MAX_LINK_DELTAS
    if message.WhichOneof("message") != "deltas" or (is_short and not parts_problem(message)):
        yield message
        return
    step = message.deltas
    part = node_pb2.StepDeltas(
        epochs=step.epochs, output_indexes=step.output_indexes, token_ids=step.token_ids
    )
    num_bytes, num_parts = part.ByteSize(), len(step.epochs)
    for delta in step.deltas:
        delta_bytes, delta_parts = delta.ByteSize(), _num_parts(delta)
        if delta_bytes > max_bytes or delta_parts > MAX_PARTS:
            delta = _too_long(delta, delta_bytes)
            delta_bytes, delta_parts = delta.ByteSize(), 0
        is_full = num_bytes + delta_bytes > max_bytes or num_parts + delta_parts > MAX_PARTS
        if num_bytes and (is_full or len(part.deltas) >= MAX_LINK_DELTAS):
            yield node_pb2.NodeMessage(deltas=part)
            part, num_bytes, num_parts = node_pb2.StepDeltas(), 0, 0
        part.deltas.append(delta)
        num_bytes += delta_bytes
        num_parts += delta_parts + _MORE_PARTS
    yield node_pb2.NodeMessage(deltas=part)


def parts_problem(message: node_pb2.NodeMessage) -> str:
    """Return why a message has too many parts to be read; empty if it may be read.

    Call this before converting the message, because counting is much cheaper.
    """
    step, events, reports = message.deltas, message.kv_events, message.peer_reports
    if len(step.deltas) > MAX_READ_DELTAS:
        return f"deltas: must be at most {MAX_READ_DELTAS} in a message, got {len(step.deltas)}"
    num_parts = max(len(step.epochs), len(step.output_indexes), len(step.token_ids))
    num_parts += len(events.stored) + len(events.removed) + sum(map(_num_parts, step.deltas))
    num_parts += len(reports.groups) + len(reports.unknown)
    if num_parts <= MAX_PARTS:  # otherwise, counting itself would take long
        num_parts += sum(len(group.engine_ids) for group in reports.groups)
    if num_parts > MAX_PARTS:
        return f"message: must have at most {MAX_PARTS} parts, got {num_parts}"
    return ""


def tops_problem(message: node_pb2.NodeMessage) -> str:
    """Return the problem if a token has too many alternatives with logprobs; empty if none has."""
    for delta in message.deltas.deltas:
        for one in itertools.chain(delta.logprobs, delta.prompt_logprobs):
            if len(one.top_token_ids) > MAX_LOGPROBS:
                return f"logprobs: must have at most {MAX_LOGPROBS} others of a token"
    return ""


def has_many_logprobs(deltas: tuple[RequestDelta, ...]) -> bool:
    """Return whether making the messages of a step takes milliseconds, because of its logprobs."""
    return sum(len(one.logprobs) + len(one.prompt_logprobs) for one in deltas) > MAX_LOGPROBS_HERE


def _num_parts(delta: node_pb2.RequestDelta) -> int:
    """Count a delta's parts, except the alternatives of tokens, which are read fast."""
    return len(delta.token_ids) + len(delta.logprobs) + len(delta.prompt_logprobs)


def _too_long(delta: node_pb2.RequestDelta, num_bytes: int) -> node_pb2.RequestDelta:
    """Return the delta that ends a request whose own delta is too long for a message."""
    problem = f"logprobs: one step has {num_bytes} bytes of them, more than a message holds"
    error = node_pb2.RequestError(code="INVALID_ARGUMENT", message=problem)
    return node_pb2.RequestDelta(request_id=delta.request_id, epoch=delta.epoch, error=error)
