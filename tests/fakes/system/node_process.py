"""A node's process and its link to the router, without threads and without gRPC.

    engine thread: `step`    KV I/O thread: `round`    asyncio: `talk`

The link is both real ends (`baton/link/node_end.py`, `router_end.py`) without a stream between
them: it keeps the order, it may break or swallow everything, and either end may notice first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field

from baton.link import wire
from baton.link.drain import Drain
from baton.link.node_end import NodeEnd
from baton.link.router_end import read_event, registered, write_command
from baton.link.router_link import RETRY_INTERVAL_S
from baton.link.router_links import ListedPeers
from baton.link.words import (
    BEAT_INTERVAL_S,
    AdminCall,
    CancelCommand,
    DecodeCommand,
    DrainCommand,
    DrainSeen,
    KVCacheEvents,
    NodeEvent,
    NodeRegistration,
    PeerReport,
    PeerReports,
    PeerUpdate,
    PeerUpdates,
    PrefillCommand,
    RouterCommand,
    SendKVSnapshot,
    ServingState,
)
from baton.v1 import node_pb2
from decode_node.node import DecodeNode
from engine.executors.uniproc import SubmittedStep
from kvconnector.ends import Receiver, Sender
from node_runtime.reports.kv_event_feed import KVEventFeed
from prefill_node.node import PrefillNode
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from tests.fakes.engine.drafting_executor import ProposingStep
from tests.fakes.handoff.handoff_cluster import end_of
from tests.fakes.time.virtual_clock import VirtualClock
from tests.fakes.time.virtual_loop import VirtualLoop


@dataclass(slots=True)
class Link:
    """Messages in flight between a node and the router; None stands for the stream's end."""

    up: deque[node_pb2.NodeMessage | None] = field(default_factory=deque)
    down: deque[node_pb2.RouterMessage | None] = field(default_factory=deque)
    joined: Node | None = None  # the router's end, while it is open

    def send(self, command: RouterCommand) -> None:
        if self.joined is not None:
            message = write_command(command, self.joined.name)
            assert isinstance(message, node_pb2.RouterMessage)
            self.down.append(message)

    def hang_up(self) -> None:
        self.joined = None
        self.down.append(None)


class NodeProcess:
    """One start of one node.

    Attributes:
        link: None while the node has none.
        stopped: it stands still; what is sent to it waits, and what it posted goes on.
        muted: nothing passes between it and the router, and neither end is told.
        num_copies: copies of the next prefix cache message that reach the router.
        is_misheard: the last one was lost; or a snapshot was, and no other came since.
        prefix_ends: ends at which the node gets and sends cached prefixes; empty: there are none.
    """

    def __init__(self, name: str, clock: VirtualClock, loop: VirtualLoop, pool: NodePool) -> None:
        self.name = name
        self.node: PrefillNode | DecodeNode
        self.registration: NodeRegistration
        self.link: Link | None = None
        self.num_copies = 1
        self.is_misheard = self._lacks_snapshot = False
        self.stopped = self.muted = self.dead = False
        self.prefix_ends: tuple[()] | tuple[Receiver, Sender] = ()
        self._clock = clock
        self._loop = loop  # of the router
        self._pool = pool
        self._drain = Drain()
        self._router_knows = False  # that it drains
        self._drained_link: Link | None = None  # on which it said that it is drained
        self._links: list[Link] = []  # whose end the router has not seen yet, and the present one
        self._dial_at = self._beat_at = 0.0
        self._end: NodeEnd
        self._peers: ListedPeers
        self._kv_events: KVEventFeed
        self._chunk_s = self._computes_until = 0.0

    def begin(
        self,
        node: PrefillNode | DecodeNode,
        registration: NodeRegistration,
        *,
        chunk_s: float = 0.0,
    ) -> None:
        """Start as this node.

        Args:
            chunk_s: how long a step takes that another one follows.
        """
        self._end = NodeEnd(registration)
        # The registration as the router reads it.
        said = wire.registration_from_proto(self._end.register().register)
        assert said is not None
        self.registration = said
        self.node, self._chunk_s = node, chunk_s
        self._peers = ListedPeers(node.submit)
        self._kv_events = KVEventFeed(node.engine.block_pool, self.emit, self._clock)

    @property
    def is_going(self) -> bool:
        return not (self.stopped or self.dead)

    @property
    def engine_id(self) -> str:
        return self.registration.engine_id

    def emit(self, event: NodeEvent) -> None:
        """Take a message from the node; it is lost while there is no link."""
        if isinstance(event, PeerReport):
            self._peers.note_report(event)
        if self.link is None:
            return
        messages = self._end.say(event, self._clock())
        num_copies = 1
        if isinstance(event, KVCacheEvents):
            num_copies, self.num_copies = self.num_copies, 1
            is_lost = num_copies == 0
            if event.snapshot:
                self._lacks_snapshot = is_lost
            # Once a later message arrives, the router sees that it missed one.
            self.is_misheard = is_lost or self._lacks_snapshot
        self.link.up += messages * num_copies

    # ------------------------------------------------------------------ the threads

    def step(self, *, waits: bool = True) -> None:
        """Run one step of the engine's thread, unless a step is still being computed.

        Args:
            waits: whether a step takes its time; False: the step in flight has ended by now.
        """
        if not self.is_going or (waits and self._clock() < self._computes_until):
            return
        engine, num_steps = self.node.engine, self.node.engine.num_steps
        busy = self.node.step()
        if self.link is None:
            assert self.node.requests() == [], "it works for a router that is gone"
        for _, pending in engine._in_flight:  # how fast this machine computes must not matter
            if isinstance(pending, ProposingStep):
                pending = pending.step
            assert isinstance(pending, SubmittedStep)
            with contextlib.suppress(Exception):  # whoever takes its outcome is told
                pending.launched()
        self._kv_events.after_step(busy=busy)
        if engine.requests and (engine.num_steps != num_steps or engine.step_in_flight):
            self._computes_until = self._clock() + self._chunk_s

    def round(self) -> None:
        """Run one round of each KV I/O thread."""
        if self.is_going:
            for end in (end_of(self.node), *self.prefix_ends):
                end.loop.round()

    def talk(self, num_up: int, num_down: int) -> None:
        """Run the asyncio side: beat, dial, and carry some messages each way."""
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
                self._dial_at = now + RETRY_INTERVAL_S
                self._dial()
        elif now >= self._beat_at:
            self._beat_at = now + BEAT_INTERVAL_S
            self.emit(self._drain.mark(self.node.beat(), all_routers_know=self._router_knows))
            if self._drain.state is ServingState.DRAINED:
                self._drained_link = self.link
                assert self.node.requests() == [], "it is not drained"
            if self._end.miss_beat():
                self.break_link()

    def _dial(self) -> None:
        assert self._pool.refusal(self.registration) == ""
        if self._pool.gate.obstacle(self.registration):
            return  # an earlier start is not known to be dead yet
        link = self.link = Link()
        self._end.take_first(registered("", self._pool.router_id))
        self._router_knows = False
        link.joined = Node(self.registration, link.send, hang_up=link.hang_up)
        self._pool.add_node(link.joined)
        self._links = [*(old for old in self._links if old.joined is not None), link]
        self.emit(PeerReports(tuple(self._peers.connected.values())))

    def break_link(self, *, router_first: bool = False, lossy: bool = True) -> None:
        """Break the stream; the other end notices later.

        Args:
            lossy: whether messages in flight to the other end are lost.
        """
        link = self.link
        if link is None:
            return
        if lossy:
            link.up.clear()
            link.down.clear()
        if router_first:
            with self._loop.entered():  # the router tells the node's peers a little later
                self._close(link)
            link.down.append(None)
            return
        link.up.append(None)
        self.link = None
        self._dial_at = self._clock() + RETRY_INTERVAL_S
        self._peers.forget_router("")
        lost = self._end.leave()
        assert lost is not None
        self.node.submit(lost)

    def lose_router(self, pool: NodePool, *, quietly: bool) -> None:
        """Lose the router's process and all that it had not read; ``pool`` is the next router's.

        Args:
            quietly: whether the machine is lost as well, so that nobody closes the streams.
        """
        self._pool = pool
        for link in self._links:
            link.joined = None
            link.up.clear()
            if not quietly:
                link.down.append(None)
        self._links = []

    def resume(self) -> None:
        """Serve again; drop drain commands that are still on their way."""
        if self.link is not None:
            kept = [m for m in self.link.down if m is None or m.WhichOneof("message") != "drain"]
            self.link.down = deque(kept)
        self._serve()

    def _serve(self) -> None:
        self._drain.resume()
        self._router_knows = False
        self._drained_link = None

    @property
    def is_draining(self) -> bool:
        return self._drain.state is not ServingState.SERVING

    def end(self, *, quietly: bool) -> None:
        """End the process; ``quietly``: its machine, too, so that nobody closes the stream."""
        self.dead = True
        if self.link is not None and not quietly:
            self.link.up.append(None)

    def _close(self, link: Link) -> None:
        node, link.joined = link.joined, None
        if node is not None:
            self._pool.remove(node)

    def _hear(self) -> bool:
        """Let the router take one message from the oldest link that has some."""
        link = next((link for link in self._links if link.up), None)
        if link is None:
            return False
        message = link.up.popleft()
        if message is None:
            self._close(link)
        elif link.joined is not None:
            event, problem = read_event(message)
            assert event is not None, problem
            self._pool.on_event(link.joined, event)
        return True

    def _obey(self) -> bool:
        """Let the node take one message."""
        if self.link is None or not self.link.down:
            return False
        message = self.link.down.popleft()
        if message is None:
            self.break_link()
            return True
        assert message.WhichOneof("message") != "registered", "a living node is sent away"
        asked = self._end.take(message)
        assert not isinstance(asked, AdminCall | tuple)
        if asked is not None:
            self._take(asked)
        return True

    def _take(self, command: RouterCommand) -> None:  # as `baton/link/router_links.py` does
        match command:
            case SendKVSnapshot():
                self._kv_events.request_snapshot()
            case DrainCommand(resume=True):
                self._serve()
            case DrainCommand():
                self._drain.begin()
            case DrainSeen():
                self._router_knows = self.is_draining
            case PeerUpdate() | PeerUpdates():
                answer = self._peers.handle_peer_news("", command)
                if answer is not None:
                    self.emit(answer)
            case PrefillCommand() | DecodeCommand() | CancelCommand():
                is_new = not isinstance(command, CancelCommand)
                assert not (is_new and self.link is self._drained_link), "it is drained"
                self.node.submit(command)
            case _:
                self.node.submit(command)
