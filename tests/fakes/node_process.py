"""A node's process and its link to the router, without threads and without gRPC.

    engine thread: `step`    KV I/O thread: `round`    asyncio: `talk`

The link does what `baton/router_link.py` and `router/link_service.py` do over a stream: it keeps
the order, it may break or swallow everything, and either end may notice first. What goes over it
is encoded as on the wire, so that nothing is shared.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass, field

from baton import wire
from baton.link import (
    BEAT_INTERVAL_S,
    AbortAll,
    NodeEvent,
    NodeRegistration,
    Refusal,
    RouterBeat,
    RouterCommand,
)
from baton.router_link import MAX_MISSED_BEATS, RETRY_INTERVAL_S
from baton.v1 import node_pb2
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from router.node import Node
from router.node_pool import NodePool
from tests.fakes.handoff_cluster import endpoint_of
from tests.fakes.virtual_clock import VirtualClock
from tests.fakes.virtual_loop import VirtualLoop


@dataclass(slots=True)
class Link:
    """What is under way between a node and the router; None: the stream's end."""

    up: deque[node_pb2.NodeMessage | None] = field(default_factory=deque)
    down: deque[node_pb2.RouterMessage | None] = field(default_factory=deque)
    joined: Node | None = None  # the router's end, while it is open

    def send(self, command: RouterCommand) -> None:
        self.down.append(wire.command_to_proto(command))

    def hang_up(self) -> None:
        self.joined = None
        self.down.append(None)


class NodeProcess:
    """One start of one node.

    Attributes:
        link: None while the node has none.
        stopped: it stands still; what is sent to it waits, and what it posted goes on.
        muted: nothing passes between it and the router, and neither end is told.
    """

    def __init__(self, name: str, clock: VirtualClock, loop: VirtualLoop, pool: NodePool) -> None:
        self.name = name
        self.node: PrefillNode | DecodeNode
        self.registration: NodeRegistration
        self.link: Link | None = None
        self.stopped = self.muted = self.dead = False
        self._clock = clock
        self._loop = loop  # of the router
        self._pool = pool
        self._links: list[Link] = []  # whose end the router has not seen yet, and the present one
        self._dial_at = self._beat_at = 0.0
        self._num_missed_beats = 0

    @property
    def is_going(self) -> bool:
        return not (self.stopped or self.dead)

    @property
    def engine_id(self) -> str:
        return self.registration.engine_id

    def emit(self, event: NodeEvent) -> None:
        """Take what the node says; nobody hears it while there is no link."""
        if self.link is not None:
            self.link.up.append(wire.node_event_to_proto(event))

    # ------------------------------------------------------------------ the threads

    def step(self) -> None:
        """One step of the engine's thread."""
        if not self.is_going:
            return
        self.node.step()
        in_flight = self.node.engine._in_flight
        if in_flight is not None:  # a run must not depend on how fast this machine computes
            wait([in_flight])

    def round(self) -> None:
        """One round of the KV I/O thread."""
        if self.is_going:
            endpoint_of(self.node).round()

    def talk(self, num_up: int, num_down: int) -> None:
        """The asyncio side: beats, dials, and carries so many messages each way."""
        with self._loop.entered():
            if self.is_going:
                self._keep_link()
            if self.muted:
                return
            while num_up > 0 and self._hear():
                num_up -= 1
        while num_down > 0 and self.is_going and self._obey():
            num_down -= 1

    # ------------------------------------------------------------------ the link

    def _keep_link(self) -> None:
        now = self._clock()
        if self.link is None:
            if now >= self._dial_at and not self.muted:
                self._dial()
        elif now >= self._beat_at:
            self._beat_at = now + BEAT_INTERVAL_S
            self.emit(self.node.beat())
            self._num_missed_beats += 1
            if self._num_missed_beats > MAX_MISSED_BEATS:
                self.break_link()

    def _dial(self) -> None:
        link = self.link = Link()
        self._num_missed_beats = 0
        link.joined = Node(self.registration, link.send, hang_up=link.hang_up, clock=self._clock)
        assert self._pool.refusal(self.registration) == ""
        self._pool.add(link.joined)
        self._links = [*(old for old in self._links if old.joined is not None), link]

    def break_link(self, *, router_first: bool = False, lossy: bool = True) -> None:
        """The stream breaks; the other end hears of it in its turn.

        Args:
            lossy: what was under way to the other end is lost.
        """
        link = self.link
        if link is None:
            return
        if lossy:
            link.up.clear()
            link.down.clear()
        if router_first:
            self._close(link)
            link.down.append(None)
            return
        link.up.append(None)
        self.link = None
        self._dial_at = self._clock() + RETRY_INTERVAL_S
        self.node.submit(AbortAll("the link to the router broke"))

    def end(self, *, quietly: bool) -> None:
        """The process is no more; ``quietly``: so is its machine, and nobody closes its stream."""
        self.dead = True
        if self.link is not None and not quietly:
            self.link.up.append(None)

    def _close(self, link: Link) -> None:
        node, link.joined = link.joined, None
        if node is not None:
            self._pool.remove(node)

    def _hear(self) -> bool:
        """The router's end of the oldest link that has something takes one message."""
        link = next((link for link in self._links if link.up), None)
        if link is None:
            return False
        message = link.up.popleft()
        if message is None:
            self._close(link)
        elif link.joined is not None:
            event = wire.node_event_from_proto(message)
            assert event is not None
            self._pool.take(link.joined, event)
        return True

    def _obey(self) -> bool:
        """The node's end takes one message."""
        if self.link is None or not self.link.down:
            return False
        message = self.link.down.popleft()
        self._num_missed_beats = 0
        if message is None:
            self.break_link()
            return True
        command = wire.command_from_proto(message)
        assert command is not None
        assert not isinstance(command, Refusal), "a living node is sent away"
        if not isinstance(command, RouterBeat):
            self.node.submit(command)
        return True
