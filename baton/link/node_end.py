"""NodeEnd: the decisions of a node's end of a link. Has no stream, task or clock.

register, take_first      join, or learn why the router refuses the node
say, take                 convert events to messages, and messages to commands
miss_beat                 notice that the router sends nothing any more
leave                     end the router's requests after the stream broke
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence

import msgspec

from baton.api.errors import ConfigError, InvalidRequestError
from baton.link import wire
from baton.link.beat_pace import INTERVALS_AT_REST, more_patience, read_intervals_at_rest
from baton.link.message_cuts import cut_message
from baton.link.words import (
    FIRST_PROTOCOL,
    AbortAll,
    AdminCall,
    CancelCommand,
    DecodeCommand,
    EncodeCommand,
    NodeEvent,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerReports,
    PrefillCommand,
    Refusal,
    RequestDelta,
    RequestError,
    RouterBeat,
    RouterCommand,
    ShareCommand,
    failed_delta,
    node_request_id,
    protocol_problem,
    split_request_id,
)
from baton.v1 import node_pb2

logger = logging.getLogger(__name__)

# If a router sends nothing during more than this many beat intervals of a node, the router has
# stopped or the network is dead. Routers answer a beat at least every second interval. If the node
# beats less often at rest, the limit is higher (`more_patience`).
MAX_MISSED_BEATS = 7
# Maximum number of reports on peers, and of characters of their problems, in one message.
MAX_PEER_REPORTS, MAX_PROBLEM_CHARS = 2**10, 2**19

Asked = RouterCommand | AdminCall | tuple[RequestDelta]
# Commands with a request id, which must be unique among routers.
_OF_A_REQUEST = PrefillCommand | DecodeCommand | EncodeCommand | ShareCommand | CancelCommand


class NodeEnd:
    """One node's successive links to one router.

    Args:
        registration: this node's registration.

    Attributes:
        router_id: id of the router's process; empty before the first link.
        joined: whether the node is linked now.
        obstacle: why the router refuses this node for now; empty: it does not refuse.
        batches_peers: whether the router reads `PeerReports`, and expects one at the link's begin.
        intervals_at_rest: beat intervals between two beats at rest, as the router asked last.
    """

    def __init__(self, registration: NodeRegistration) -> None:
        self.router_id = ""
        self.joined = False
        self.obstacle = ""
        self.batches_peers = False
        self.intervals_at_rest = INTERVALS_AT_REST
        # Each router gets another key, so that no router can pose as this node at another router.
        self._registration = dataclasses.replace(
            registration, process_key=secrets.token_bytes(16), batches_peers=True
        )
        self._num_missed_beats = 0

    def register(self) -> node_pb2.NodeMessage:
        """Return the registration, the first message of a stream."""
        return wire.registration_to_proto(self._registration)

    def take_first(self, message: node_pb2.RouterMessage) -> None:
        """Handle the answer to the registration: join, or keep why the router refuses.

        Raises:
            ConfigError: the router refused this node for good.
        """
        self.obstacle = message.registered.problem
        if not self.obstacle:
            theirs = message.registered.protocol or FIRST_PROTOCOL
            if problem := protocol_problem(self._registration.protocol, own=theirs):
                raise ConfigError(problem)
            self.router_id = message.registered.router_id
            self.batches_peers = message.registered.batches_peers
            told = message.registered.intervals_at_rest
            self.intervals_at_rest = read_intervals_at_rest(told)
            self.joined, self._num_missed_beats = True, 0
        elif not message.registered.may_retry:
            raise ConfigError(f"the router refused this node: {self.obstacle}")

    def say(self, event: NodeEvent, now: float) -> list[node_pb2.NodeMessage]:
        """Return the messages that report an event to the router; none if the event cannot be sent.

        Args:
            now: current time, by the clock of `RequestDelta.sampled_at`.
        """
        if self._registration.role is NodeRole.PREFILL and isinstance(event, tuple):
            event = tuple(_with_send_time(delta, now) for delta in event)
        try:
            message = wire.node_event_to_proto(event)
        except ValueError as error:  # a peer sent a value that no message can hold
            logger.error("dropped an event that cannot be sent: %s", error)
            return []
        for delta in message.deltas.deltas:
            delta.request_id, _ = split_request_id(delta.request_id)
        return list(cut_message(message))

    def take(self, message: node_pb2.RouterMessage) -> Asked | None:
        """Return the command in a router's message, or the deltas to reply with; None: neither."""
        self._num_missed_beats = 0
        try:
            command = wire.command_from_proto(message)
        # The router sent invalid data, which is no error of this program.
        except InvalidRequestError as error:
            logger.warning("refused a command: %s", error)
            # Other commands need no answer: a prefill node encodes or computes what it does not
            # receive.
            if message.WhichOneof("message") not in ("prefill", "decode"):
                return None
            return self._refuse(message, str(error))
        if isinstance(command, _OF_A_REQUEST):
            name = node_request_id(command.request_id, self.router_id)
            return dataclasses.replace(command, request_id=name)
        if isinstance(command, RouterBeat):
            self.intervals_at_rest = read_intervals_at_rest(command.intervals_at_rest)
            return None
        return None if isinstance(command, Refusal) else command

    def _refuse(self, message: node_pb2.RouterMessage, problem: str) -> tuple[RequestDelta]:
        """Return the delta that reports an invalid command to the router."""
        kind = message.WhichOneof("message")
        command = message.prefill if kind == "prefill" else message.decode
        name = node_request_id(command.request_id, self.router_id)
        error = RequestError("INVALID_ARGUMENT", problem)
        return (failed_delta(name, command.epoch, error),)

    @property
    def awaits_answer(self) -> bool:
        """Return whether the router's answer is late, so that the router may be silent."""
        return self.joined and self._num_missed_beats > self.intervals_at_rest

    def miss_beat(self, num_intervals: int = 1) -> bool:
        """Count the intervals of one beat of this node; return whether the router is silent.

        Counts beats, not time, so a pause of this process does not make the router look silent.
        """
        self._num_missed_beats += num_intervals
        limit = MAX_MISSED_BEATS + more_patience(self.intervals_at_rest)
        return self._num_missed_beats > limit

    def leave(self) -> AbortAll | None:
        """Leave the link; return the command to end the router's requests; None if not joined."""
        if not self.joined:
            return None
        self.joined = False
        return AbortAll("the link to the router broke", self.router_id)


def _with_send_time(delta: RequestDelta, now: float) -> RequestDelta:
    """Write into token 1's receipt how long the node held the token after sampling."""
    if delta.prefill is None or not delta.sampled_at:
        return delta
    receipt = dataclasses.replace(delta.prefill, send_s=max(now - delta.sampled_at, 0.0))
    return msgspec.structs.replace(delta, prefill=receipt, sampled_at=0.0)


def merge_reports(events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Merge consecutive reports on peers into `PeerReports`, for a router that reads them."""
    merged = list[NodeEvent]()
    reports, num_chars = list[PeerReport](), 0

    def flush() -> None:
        nonlocal num_chars
        if reports:
            merged.append(PeerReports(tuple(reports)))
        reports.clear()
        num_chars = 0

    for event in events:
        if isinstance(event, PeerReport):
            reports.append(event)
            num_chars += len(event.problem)
            if len(reports) >= MAX_PEER_REPORTS or num_chars >= MAX_PROBLEM_CHARS:
                flush()
        else:
            flush()
            merged.append(event)
    flush()
    return merged


def merge_steps(events: Sequence[NodeEvent]) -> list[NodeEvent]:
    """Merge consecutive steps into one, so that fewer messages are sent.

    A slow event loop sends one message per round, and beats must not wait behind many steps. A step
    with more than plain tokens, such as logprobs, is the last one of a merged step, because a
    router reads the plain tokens of a message first.
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
