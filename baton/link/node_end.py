"""NodeEnd: what a node's end of a link to a router decides. No stream, no task, no clock.

register, take_first      join, or say what is in the way
say, take                 events up and commands down, with requests under the other's names
miss_beat                 a router that says nothing for too long is silent
leave                     the stream broke: what the router had placed here ends
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence

import msgspec

from baton.api.errors import ConfigError, InvalidRequestError
from baton.link import wire
from baton.link.message_cuts import cut_message
from baton.link.words import (
    FIRST_PROTOCOL,
    AbortAll,
    AdminCall,
    CancelCommand,
    DecodeCommand,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PrefillCommand,
    Refusal,
    RequestDelta,
    RequestError,
    RouterBeat,
    RouterCommand,
    failed_delta,
    node_request_id,
    protocol_problem,
    split_request_id,
)
from baton.v1 import node_pb2

logger = logging.getLogger(__name__)

# A router that misses more beats is stopped or behind a dead network.
MAX_MISSED_BEATS = 6

Asked = RouterCommand | AdminCall | tuple[RequestDelta]


class NodeEnd:
    """One node's end of its links to one router, one after the other.

    Args:
        registration: who this node is.

    Attributes:
        router_id: of the router's process, once it was joined.
        joined: whether there is a link now.
        obstacle: why the router does not take this node now, if it said so when last asked.
    """

    def __init__(self, registration: NodeRegistration) -> None:
        self.router_id = ""
        self.joined = False
        self.obstacle = ""
        # A key for each router: none of them can show the others' to be this node.
        self._registration = dataclasses.replace(registration, process_key=secrets.token_bytes(16))
        self._num_missed_beats = 0

    def register(self) -> node_pb2.NodeMessage:
        """The first message of a stream."""
        return wire.registration_to_proto(self._registration)

    def take_first(self, message: node_pb2.RouterMessage) -> None:
        """Join, unless the router has something against it now.

        Raises:
            ConfigError: it refused this node for good, and why.
        """
        self.obstacle = message.registered.problem
        if not self.obstacle:
            theirs = message.registered.protocol or FIRST_PROTOCOL
            if problem := protocol_problem(self._registration.protocol, own=theirs):
                raise ConfigError(problem)
            self.router_id = message.registered.router_id
            self.joined, self._num_missed_beats = True, 0
        elif not message.registered.may_retry:
            raise ConfigError(f"the router refused this node: {self.obstacle}")

    def say(self, event: NodeEvent, now: float) -> list[node_pb2.NodeMessage]:
        """Messages for an event, as short as others' tokens want it; none if it cannot be sent.

        Args:
            now: by the clock of `RequestDelta.sampled_at`.
        """
        if self._registration.role is NodeRole.PREFILL and isinstance(event, tuple):
            event = tuple(_with_send_time(delta, now) for delta in event)
        try:
            message = wire.node_event_to_proto(event)
        except ValueError as error:  # a value that a peer sent and the wire cannot hold
            logger.error("dropped an event that cannot be sent: %s", error)
            return []
        for delta in message.deltas.deltas:
            delta.request_id, _ = split_request_id(delta.request_id)
        return list(cut_message(message))

    def take(self, message: node_pb2.RouterMessage) -> Asked | None:
        """What a message asks of the node, or, as deltas, what is to be said to it at once."""
        self._num_missed_beats = 0
        try:
            command = wire.command_from_proto(message)
        except InvalidRequestError as error:  # from the network: data, not a bug
            logger.warning("refused a command: %s", error)
            return self._refuse(message, str(error))
        if isinstance(command, PrefillCommand | DecodeCommand | CancelCommand):
            name = node_request_id(command.request_id, self.router_id)
            return dataclasses.replace(command, request_id=name)
        return None if isinstance(command, RouterBeat | Refusal) else command

    def _refuse(self, message: node_pb2.RouterMessage, problem: str) -> tuple[RequestDelta]:
        """Tell the router that a request's command makes no sense, so that nobody waits for it."""
        kind = message.WhichOneof("message")
        command = message.prefill if kind == "prefill" else message.decode
        name = node_request_id(command.request_id, self.router_id)
        error = RequestError("INVALID_ARGUMENT", problem)
        return (failed_delta(name, command.epoch, error),)

    def miss_beat(self) -> bool:
        """Count a beat of ours; whether so many went by without a word that the router is silent.

        Our own ticks count, not time: a process that stood still has missed none.
        """
        self._num_missed_beats += 1
        return self._num_missed_beats > MAX_MISSED_BEATS

    def leave(self) -> AbortAll | None:
        """The stream broke; what the router had placed here ends. None: there was no link."""
        if not self.joined:
            return None
        self.joined = False
        return AbortAll("the link to the router broke", self.router_id)


def _with_send_time(delta: RequestDelta, now: float) -> RequestDelta:
    """Say in the receipt of a token 1 how long the node had the token since it was sampled."""
    if delta.prefill is None or not delta.sampled_at:
        return delta
    receipt = dataclasses.replace(delta.prefill, send_s=max(now - delta.sampled_at, 0.0))
    return msgspec.structs.replace(delta, prefill=receipt, sampled_at=0.0)


def merge_steps(events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Return the events with consecutive steps merged into one, so that fewer messages are sent.

    A slow event loop sends one message in each round. Steps must not pile up in front of beats.
    Only the last step of a merged one has more than plain tokens: a router reads these first.
    """
    merged = list[NodeEvent]()
    before: NodeEvent | None = None
    for event in events:
        if (
            isinstance(event, tuple)
            and isinstance(before, tuple)
            and all(map(wire.is_plain, before))
        ):
            last = merged.pop()
            assert isinstance(last, tuple)
            merged.append((*last, *event))
        else:
            merged.append(event)
        before = event
    return merged
