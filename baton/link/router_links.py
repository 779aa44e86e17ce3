"""RouterLinks: a node's links to all of its routers.

Routers do not know each other. The tokens of a request go to the router that placed the request;
all other events go to every router. A DNS name may have the addresses of several routers; when an
address is added to the name later, the node joins that router, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from baton.access.exposure import split_address
from baton.access.tls import NO_TLS, TlsOptions
from baton.api.errors import ConfigError, NodeUnavailableError
from baton.kv.prefixes import is_prefix_end
from baton.link.admin_answers import Answer
from baton.link.beat_pace import INTERVALS_AT_REST
from baton.link.drain import Drain
from baton.link.router_link import RouterLink
from baton.link.words import (
    AbortAll,
    DrainCommand,
    DrainSeen,
    NodeBeat,
    NodeEvent,
    NodeRegistration,
    PeerReport,
    PeerReports,
    PeerUpdate,
    PeerUpdates,
    RequestDelta,
    RouterCommand,
    ServingState,
    split_request_id,
)

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 10.0
_FIRST_RESOLVE_INTERVAL_S = 0.5
_LINKED_INTERVAL_S = 2.0  # between two looks at links of which one is up
# A router that has just been joined lists all living peers within this time. A peer that it does
# not list has left while the router was away.
UNLISTED_S = 60.0


class ListedPeers:
    """The peers that a node's routers list, and the peers to which the node is connected.

    Args:
        submit: gets an update when a peer joins, and when a peer has left all routers.

    Attributes:
        connected: the latest report on each peer to which the node is connected, by engine id; sent
            to routers that the node joins later.
        reached: engine ids of these peers without a prefill node's encode nodes.
    """

    def __init__(self, submit: Callable[[PeerUpdate], None]) -> None:
        self.connected: dict[str, PeerReport] = {}
        self.reached: set[str] = set()
        self._submit = submit
        # Engine id -> addresses of the routers that list the peer.
        self._listed_by: dict[str, set[str]] = {}

    def note_report(self, report: PeerReport) -> None:
        """Note the node's report on a peer."""
        if is_prefix_end(report.engine_id):
            return
        if report.connected:
            self.connected[report.engine_id] = report
        else:
            self.connected.pop(report.engine_id, None)
        if not report.is_encode_node:
            note = self.reached.add if report.connected else self.reached.discard
            note(report.engine_id)

    def handle_peer_news(self, address: str, news: PeerUpdate | PeerUpdates) -> PeerReports | None:
        """Pass on news of the router at this address; return an answer for the router, or None."""
        if isinstance(news, PeerUpdate):
            self._handle_update(address, news)
            return None
        for update in news.updates:
            self._handle_update(address, update)
        for engine_id in self.connected.keys() & set(news.known):
            self._listed_by.setdefault(engine_id, set()).add(address)
        unknown = tuple(one for one in news.known if one not in self.connected)
        return PeerReports(unknown=unknown) if unknown else None

    def _handle_update(self, address: str, update: PeerUpdate) -> None:
        routers = self._listed_by.setdefault(update.engine_id, set())
        if not update.removed:
            routers.add(address)
            self._submit(update)
            return
        routers.discard(address)
        if not routers:  # a peer is alive as long as any router lists it
            self._forget(update.engine_id)
            self._submit(update)

    def _forget(self, engine_id: str) -> None:
        self._listed_by.pop(engine_id, None)
        self.connected.pop(engine_id, None)
        self.reached.discard(engine_id)

    def forget_router(self, address: str) -> None:
        """Forget which peers a router lists, because the link to the router broke."""
        for routers in self._listed_by.values():
            routers.discard(address)

    def forget_unlisted(self) -> None:
        """Forget the peers that no router lists."""
        for engine_id in [one for one, routers in self._listed_by.items() if not routers]:
            self._forget(engine_id)
            self._submit(PeerUpdate(engine_id, removed=True))

    def leave(self) -> None:
        """Forget all peers, because the node leaves all routers."""
        self._listed_by = {engine_id: set() for engine_id in self._listed_by}
        self.forget_unlisted()
        self.connected.clear()
        self.reached.clear()


class RouterLinks:
    """A link to each router, on the node's asyncio loop.

    Args:
        routers: ``host:port`` of each router; a host may have several addresses.
        registration: this node's registration.
        submit: receives commands for the node's loop; returns at once.
        drain: the node's serving state.
        on_joined: called with True if the node is linked to at least one router, else with False.
        on_stop: called when a router orders the process to end after draining.
        join_timeout_s: how long to try to reach a first router.
        node_token: authorizes this node to join.
        answer: answers operators' questions; None: questions are not answered.
        tls: this node's certificates.
        turns: limits how many links of this process connect at a time; None: no limit.
    """

    def __init__(
        self,
        routers: Sequence[str],
        registration: NodeRegistration,
        submit: Callable[[RouterCommand | AbortAll], None],
        drain: Drain,
        *,
        on_joined: Callable[[bool], Awaitable[None]],
        on_stop: Callable[[], None],
        join_timeout_s: float,
        node_token: str = "",
        answer: Answer | None = None,
        tls: TlsOptions = NO_TLS,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self._peers = ListedPeers(submit)
        self._turns = turns
        self._routers = routers
        self._registration = registration
        self._submit = submit
        self._drain = drain
        self._on_joined = on_joined
        self._on_stop = on_stop
        self._join_timeout_s = join_timeout_s
        self._node_token = node_token
        self._answer = answer
        self._tls = tls
        self._links: dict[str, RouterLink] = {}  # by address
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seers: set[str] = set()  # addresses of routers that know that this node drains
        self._is_away = False  # True from `leave` until `join`
        self._resolve_at = 0.0
        self._forget_at = math.inf  # time at which to forget the peers that no router lists

    @property
    def reached(self) -> set[str]:
        """Engine ids of the peers that this node is connected to; see `ListedPeers`."""
        return self._peers.reached

    @property
    def all_know_drain(self) -> bool:
        """Return whether every joined router knows that this node drains."""
        joined = {address for address, link in self._links.items() if link.joined}
        return joined <= self._seers

    async def leave(self) -> None:
        """End all links and the requests of their routers; make no link until `join`.

        Routers and peers then treat the node as gone.
        """
        self._is_away = True
        tasks, links = list(self._tasks.values()), list(self._links.values())
        self._tasks.clear()
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            if (lost := link.leave()) is not None:
                self._submit(lost)
        self._peers.leave()
        self._seers.clear()
        await self._on_joined(False)

    def join(self, registration: NodeRegistration) -> None:
        """Join all routers again, with a new registration that has the same address."""
        address = self._registration.address
        self._registration = dataclasses.replace(registration, address=address)
        self._is_away, self._resolve_at = False, 0.0

    def emit(self, event: NodeEvent) -> None:
        """Send an event to the routers that it concerns.

        Call this on the thread of the event loop.
        """
        if isinstance(event, PeerReport):
            self._peers.note_report(event)
        if not isinstance(event, tuple):
            for link in self._links.values():
                link.emit(event)
        elif len(self._links) == 1:
            next(iter(self._links.values())).emit(event)
        else:
            for router_id, deltas in _by_router(event).items():
                for link in self._links.values():
                    if link.router_id == router_id:
                        link.emit(tuple(deltas))

    def beat(self, beat: NodeBeat, num_intervals: int = 1) -> int:
        """Report load and serving state to all routers, and end the links of silent routers.

        Returns the number of beat intervals until the next call: 1 unless the node is at rest and
        no answer is late. The router that asks for the most beats decides.

        Args:
            num_intervals: beat intervals since the last call.
        """
        marked = self._drain.mark(beat, all_routers_know=self.all_know_drain)
        self.emit(marked)
        for link in self._links.values():
            link.count_beat(num_intervals)
        links = [link for link in self._links.values() if link.joined]
        if not marked.rests or any(link.awaits_answer for link in links):
            return 1
        return min((link.intervals_at_rest for link in links), default=INTERVALS_AT_REST)

    async def run(self) -> None:
        """Keep all links up; never returns.

        Raises:
            NodeUnavailableError: no router answered before the first join timed out.
            ConfigError: a router refused this node.
        """
        give_up_at = time.monotonic() + self._join_timeout_s
        ever_joined = False
        try:
            while True:
                now = time.monotonic()
                ever_joined |= any(link.joined for link in self._links.values())
                if self._is_away or any(link.joined for link in self._links.values()):
                    give_up_at = now + self._join_timeout_s
                elif now > give_up_at:
                    self._give_up(ever_joined=ever_joined)
                if now >= self._resolve_at and not self._is_away:
                    self._resolve_at = now + RESOLVE_INTERVAL_S
                    await self._follow(await resolve_routers(self._routers))
                    if not self._links:
                        self._resolve_at = now
                if now >= self._forget_at:
                    self._forget_at = math.inf
                    self._peers.forget_unlisted()
                tasks = list(self._tasks.values())
                if tasks:
                    is_linked = any(link.joined for link in self._links.values())
                    pause_s = _LINKED_INTERVAL_S if is_linked else _FIRST_RESOLVE_INTERVAL_S
                    done, _ = await asyncio.wait(
                        tasks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        if not task.cancelled():  # by `leave`
                            self._end(task)
                else:
                    await asyncio.sleep(_FIRST_RESOLVE_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _give_up(self, *, ever_joined: bool) -> None:
        """Raise the reason why no router was joined, if the time for joining is over."""
        obstacles = [link.obstacle for link in self._links.values() if link.obstacle]
        if obstacles:  # most likely another node with this name has joined
            raise ConfigError(
                f"the router refuses this node for {self._join_timeout_s:g} s: {obstacles[0]}"
            )
        if not ever_joined:
            problems = dict.fromkeys(link.problem for link in self._links.values())
            why = "; ".join(filter(None, problems))
            raise NodeUnavailableError(
                f"router: {', '.join(self._routers)} cannot be reached (tried for "
                f"{self._join_timeout_s:g} s){': ' if why else ''}{why}"
            )

    def _end(self, task: asyncio.Task[None]) -> None:
        """Raise the error that ended a link; if this node drains, log it and drop the link."""
        try:
            task.result()  # always raises, because a link does not end by itself
        except ConfigError as error:
            if self._drain.state is ServingState.SERVING:
                raise
            # The error is not raised, because other routers may still wait for results of this
            # node.
            logger.warning("%s", error)
            (address,) = (name for name, one in self._tasks.items() if one is task)
            del self._tasks[address], self._links[address]

    async def _follow(self, addresses: Mapping[str, str]) -> None:
        """Make links to new addresses; drop links that are not joined and whose address is gone.

        Args:
            addresses: address -> the host that resolved to this address.
        """
        if not addresses or self._is_away:  # name resolution failed: all links stay
            return
        for address in self._links.keys() - set(addresses):
            if not self._links[address].joined:
                logger.info("router %s is no longer among this node's addresses", address)
                del self._links[address]
                task = self._tasks.pop(address)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for address, host in addresses.items():
            if address not in self._links:
                self._links[address] = link = self._make_link(address, host)
                self._tasks[address] = asyncio.create_task(link.run())

    def _make_link(self, address: str, host: str) -> RouterLink:
        async def on_joined(joined: bool) -> None:
            self._seers.discard(address)
            if not joined:  # the router's list of peers is out of date
                self._peers.forget_router(address)
            is_linked = any(link.joined for link in self._links.values())
            self._forget_at = time.monotonic() + UNLISTED_S if is_linked else math.inf
            await self._on_joined(is_linked)

        return RouterLink(
            address,
            self._registration,
            lambda command: self._take(address, command),
            on_joined=on_joined,
            join_timeout_s=float("inf"),  # `run` decides when to give up
            node_token=self._node_token,
            answer=self._answer,
            tls=self._tls,
            server_name=host,
            connected_peers=self._peers.connected.values,
            turns=self._turns,
        )

    def _take(self, address: str, command: RouterCommand | AbortAll) -> None:
        match command:
            case DrainCommand(resume=True):
                self._drain.resume()
                self._seers.clear()
            case DrainCommand():
                self._drain.begin()
                if command.stop:
                    self._on_stop()
            case DrainSeen():
                if self._drain.state is not ServingState.SERVING:
                    self._seers.add(address)
            case PeerUpdate() | PeerUpdates():
                answer = self._peers.handle_peer_news(address, command)
                if answer is not None:
                    self._links[address].emit(answer)
            case _:
                self._submit(command)


def _by_router(deltas: Sequence[RequestDelta]) -> dict[str, list[RequestDelta]]:
    grouped: dict[str, list[RequestDelta]] = {}
    for delta in deltas:
        _, router_id = split_request_id(delta.request_id)
        grouped.setdefault(router_id, []).append(delta)
    return grouped


async def resolve_routers(routers: Sequence[str]) -> dict[str, str]:
    """Return all routers' addresses, each with its host; names that fail to resolve are skipped.

    A name with a single address is not replaced, so that log messages show the name.
    """
    loop = asyncio.get_running_loop()
    addresses: dict[str, str] = {}
    for router in routers:
        host, port = split_address("router", router)
        try:
            found = await loop.getaddrinfo(
                host.strip("[]"), port, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM
            )
        except OSError as error:
            logger.debug("%s has no address: %s", host, error)
            continue
        hosts = list(dict.fromkeys(str(item[4][0]) for item in found))
        # A name with both kinds of address usually means one machine, so IPv4 is enough.
        ipv4 = [name for name in hosts if ":" not in name]
        names = ipv4 or [f"[{name}]" for name in hosts]
        if len(names) == 1:
            addresses[router] = host
        else:
            addresses.update(dict.fromkeys((f"{name}:{port}" for name in names), host))
    return addresses
