"""LongMessages: reads long messages of nodes in a thread, and divides their events into pieces.

One message may have 300,000 parts. Reading the parts takes more than a second; passing their events
to the requests takes nearly another second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from baton.api.errors import InvalidRequestError
from baton.link import wire
from baton.link.message_cuts import parts_problem, tops_problem
from baton.link.words import NodeEvent, NodeRegistration, StepDeltas
from baton.v1 import node_pb2
from baton.wire.parts import count_parts
from baton.wire.reading import Unread
from router.fleet.node import Node
from router.fleet.node_claims import MAX_REGISTRATION_PARTS, Vocabulary, event_problem

HEARD_INTERVAL_S = 0.1
# Number of rows and of deltas in one piece. A piece takes some milliseconds to handle; a message
# about one ordinary step fits into one piece.
ROWS_AT_ONCE, DELTAS_AT_ONCE = 2**13, 2**10


class LongMessages:
    """Reads long messages in a thread of its own; a link may have one long message at a time."""

    def __init__(self) -> None:
        # A single thread: more threads would keep the GIL from the event loop for too long.
        self._thread = ThreadPoolExecutor(1, "long-link-messages")

    async def read(
        self, node: Node, message: Unread, vocabulary: Vocabulary
    ) -> tuple[list[NodeEvent], str]:
        """Return a message's events in pieces, or an empty list and why the message is invalid.

        Later messages of this node wait until the message is read; the router goes on meanwhile.
        """
        reading = asyncio.get_running_loop().run_in_executor(
            self._thread, _read, message, node.registration, vocabulary
        )
        try:
            while not reading.done():
                # The node cannot be heard while the router reads its message
                node.num_missed_beats = 0
                await asyncio.wait([reading], timeout=HEARD_INTERVAL_S)
        finally:
            reading.cancel()  # if the link ended meanwhile, the message need not be read
        return reading.result()


def read_registration(message: Unread) -> node_pb2.NodeMessage:
    """Read a link's first message, even though it is long.

    Raises InvalidRequestError if the message has too many parts.
    """
    num_parts = count_parts(message.data, node_pb2.NodeMessage, MAX_REGISTRATION_PARTS)
    if num_parts > MAX_REGISTRATION_PARTS:
        raise InvalidRequestError("registration", f"has more than {MAX_REGISTRATION_PARTS} parts")
    read: node_pb2.NodeMessage = message.message()
    return read


def _read(
    unread: Unread, registration: NodeRegistration, vocabulary: Vocabulary
) -> tuple[list[NodeEvent], str]:
    try:
        message: node_pb2.NodeMessage = unread.message()
    except InvalidRequestError as error:
        return [], str(error)
    problem = parts_problem(message) or tops_problem(message)
    event = None if problem else wire.node_event_from_proto(message)
    if event is None:
        return [], problem
    problem = event_problem(registration, event, vocabulary)
    return ([], problem) if problem else (list(_pieces(event)), "")


def _pieces(event: NodeEvent) -> Iterator[NodeEvent]:
    if not isinstance(event, StepDeltas):
        yield event
        return
    for first in range(0, len(event.epochs), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        yield StepDeltas(event.epochs[rows], event.output_indexes[rows], event.token_ids[rows])
    for first in range(0, len(event.deltas), DELTAS_AT_ONCE):
        yield StepDeltas((), (), (), event.deltas[first : first + DELTAS_AT_ONCE])
