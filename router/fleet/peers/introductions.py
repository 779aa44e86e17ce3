"""Introductions: tells the nodes of a pool which peers joined and left.

    node joins -> its first PeerReports -> introduced to all peers, and all peers to the node
                                           |
               news for each reader <------'   sent together, at most MESSAGES_PER_S

A thousand nodes have a quarter of a million pairs, so one message for each end of a pair would keep
a router busy for minutes. A node that reads `PeerUpdates` gets all its news in one message. Such a
node begins its link with reports on the peers to which it is connected, for example after a restart
of the router; the router need not tell the node how to reach these peers. A node of an older
release gets one message for each peer at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baton.link.words import PeerReport, PeerReports, PeerUpdate, PeerUpdates
from router.fleet.node import Node
from router.fleet.peers.pairing import (
    Reach,
    are_peers,
    incompatibility,
    may_fetch,
    may_meet,
    update_about,
)

logger = logging.getLogger(__name__)

# Maximum mean number of messages with news per second, so that a storm of joins leaves the router
# time for other work. With its answer, a message takes about 0.2 ms on the router and on all nodes
# together.
MESSAGES_PER_S = 1_000.0
# Seconds for which news wait for further news if they only list peers to which the reader is
# connected. After a restart of a router, its nodes join again one after another.
KNOWN_S = 2.0
# Maximum bytes of peer infos in one message; a longer message would delay beats and commands.
MAX_NEWS_BYTES = 2**20
# Maximum number of one node's reports on peers that have not joined yet, and for how many seconds
# they are kept. After a restart of a router, its nodes join again within seconds.
MAX_EARLY, EARLY_S = 4096, 60.0


@dataclass(slots=True, eq=False)
class _News:
    """The news of peers that one node must be told.

    Attributes:
        due: time of the event loop at which the news are sent.
        joined: updates about peers that joined, by engine id; None: the reader is connected to the
            peer already.
        removed: engine ids of peers that left; told before ``joined``.
    """

    reader: Node
    due: float = math.inf
    joined: dict[str, PeerUpdate | None] = field(default_factory=dict)
    removed: dict[str, None] = field(default_factory=dict)

    def messages(self) -> Iterator[PeerUpdates]:
        """Yield the news as messages, each with at most `MAX_NEWS_BYTES` of peer infos."""
        updates = [PeerUpdate(engine_id, removed=True) for engine_id in self.removed]
        known = tuple(engine_id for engine_id, update in self.joined.items() if update is None)
        num_bytes = 0
        for update in self.joined.values():
            if update is None:
                continue
            num_bytes += _num_bytes(update)
            if num_bytes > MAX_NEWS_BYTES and updates:
                yield PeerUpdates(tuple(updates))
                updates, num_bytes = [], _num_bytes(update)
            updates.append(update)
        if updates or known:
            yield PeerUpdates(tuple(updates), known)


@dataclass(slots=True, eq=False)
class _Early:
    """A node's first reports on peers that have not joined yet, kept until the time ``until``."""

    until: float
    reports: dict[str, PeerReport]


class Introductions:
    """Introduces the nodes of one pool to each other.

    Args:
        reach: gets the nodes' reports on peers that joined after the reports.
        clock: returns monotonic seconds.
    """

    def __init__(self, reach: Reach, clock: Callable[[], float] = time.monotonic) -> None:
        self._reach = reach
        self._clock = clock
        self._here: dict[str, Node] = {}  # introduced nodes, by engine id
        self._early: dict[str, _Early] = {}  # by engine id of the reporting node; oldest first
        self._news: dict[str, _News] = {}  # by engine id of the reader
        self._sending: asyncio.Handle | None = None  # the next call of `_send_news`
        self._sending_at = math.inf  # as `_News.due`
        self._rest_until = -math.inf  # as `_News.due`

    # ------------------------------------------------------------------ nodes

    def add_node(self, node: Node) -> None:
        """Introduce a node that joined, unless it will send `PeerReports` first."""
        if not node.registration.batches_peers:
            self._introduce(node)

    def note_reports(self, node: Node, strangers: Iterable[PeerReport]) -> bool:
        """Introduce a node that has sent `PeerReports`, if these are its first.

        Returns whether the node was introduced now.

        Args:
            strangers: the node's reports on peers that have not joined.
        """
        if node.engine_id in self._here:
            return False
        now = self._clock()
        for engine_id, early in list(self._early.items()):
            if early.until > now:
                break
            del self._early[engine_id]
        connected = [one for one in strangers if one.connected and not one.problem]
        reports = {one.engine_id: one for one in connected[:MAX_EARLY]}
        self._early[node.engine_id] = _Early(now + EARLY_S, reports)
        self._introduce(node)
        return True

    def introduce_again(self, node: Node, reports: PeerReports) -> None:
        """Introduce a node and the peers that it reports as unknown to each other again."""
        for engine_id in reports.unknown:
            peer = self._here.get(engine_id)
            # A node reports on a peer before it lists the peer as unknown: answer once per report.
            if peer is None or node.reports.pop(engine_id, None) is None:
                continue
            if are_peers(node, peer):
                self._reach.note_report(node, peer)
                self._tell_of_peer(node, peer)
                self._tell_of_peer(peer, node)

    def remove_node(self, node: Node) -> None:
        """Forget a node that left, and tell its peers."""
        self._early.pop(node.engine_id, None)
        self._news.pop(node.engine_id, None)
        was_introduced = self._here.pop(node.engine_id, None) is not None
        for other in self._peers_of(node):
            other.reports.pop(node.engine_id, None)
            if not was_introduced:
                continue
            if not other.registration.batches_peers:
                other.send(PeerUpdate(node.engine_id, removed=True))
                continue
            news = self._news_for(other)
            news.joined.pop(node.engine_id, None)
            news.removed[node.engine_id] = None

    # ------------------------------------------------------------------ inside

    def _introduce(self, node: Node) -> None:
        """Tell a node about its compatible peers, and the peers about the node."""
        for other in self._peers_of(node):
            problem = incompatibility(node.registration, other.registration)
            if not problem:
                are_connected = self._are_connected(node, other)
                self._tell_of_peer(node, other, is_known=are_connected)
                self._tell_of_peer(other, node, is_known=are_connected)
            # Log no problem of two nodes that could only exchange cached prefixes.
            elif may_meet(node.registration, other.registration):
                _note_problem(node, other, problem)
        self._here[node.engine_id] = node

    def _peers_of(self, node: Node) -> list[Node]:
        said = node.registration
        return [
            other
            for other in self._here.values()
            if other is not node
            and (may_meet(other.registration, said) or may_fetch(other.registration, said))
        ]

    def _are_connected(self, one: Node, other: Node) -> bool:
        """Return whether both nodes have reported that they are connected to each other.

        If only one node has reported this, both get full updates, because they then connect faster.
        The pair gets no requests until both nodes have reported again.
        """
        self._take_early(one, other)
        self._take_early(other, one)
        reports = one.reports.get(other.engine_id), other.reports.get(one.engine_id)
        if not all(report is not None and report.connected for report in reports):
            self._forget_reports(one, other)
            return False
        # Reports say nothing about ends for cached prefixes, so such nodes get full updates.
        return not may_fetch(one.registration, other.registration)

    def _forget_reports(self, one: Node, other: Node) -> None:
        """Forget what two nodes reported on each other, because they will meet again."""
        for node, peer in ((one, other), (other, one)):
            if node.reports.pop(peer.engine_id, None) is not None:
                self._reach.note_report(node, peer)

    def _take_early(self, node: Node, peer: Node) -> None:
        """Store the report that a node sent on a peer before the peer joined."""
        early = self._early.get(node.engine_id)
        report = early.reports.pop(peer.engine_id, None) if early and early.reports else None
        if report is not None and may_meet(node.registration, peer.registration):
            node.reports[peer.engine_id] = report
            self._reach.note_report(node, peer)

    def _tell_of_peer(self, reader: Node, peer: Node, *, is_known: bool = False) -> None:
        """Tell a node about a compatible peer: with its next news, or at once to an old release."""
        if reader.registration.batches_peers:
            update = None if is_known else update_about(peer, reader)
            news = self._news_for(reader, KNOWN_S if is_known else 0.0)
            news.joined[peer.engine_id] = update
        else:
            reader.send(update_about(peer, reader))

    def _news_for(self, reader: Node, wait_s: float = 0.0) -> _News:
        """Return the news for a node, which are sent in ``wait_s`` seconds or before."""
        news = self._news.get(reader.engine_id)
        if news is None:
            news = self._news[reader.engine_id] = _News(reader)
        due = asyncio.get_running_loop().time() + wait_s
        if due < news.due:
            news.due = due
            self._send_at(due)
        return news

    def _send_at(self, due: float) -> None:
        """Call `_send_news` at this time, or once messages may be sent again."""
        at = max(due, self._rest_until)
        if self._sending is not None:
            if self._sending_at <= at:
                return
            self._sending.cancel()
        self._sending = asyncio.get_running_loop().call_at(at, self._send_news)
        self._sending_at = at

    def _send_news(self) -> None:
        """Send the news that are due."""
        self._sending = None
        now, num_messages = asyncio.get_running_loop().time(), 0
        due = [one for one in self._news.values() if one.due <= now]
        for one in due:
            del self._news[one.reader.engine_id]
            for message in one.messages():
                one.reader.send(message)
                num_messages += 1
        self._rest_until = now + num_messages / MESSAGES_PER_S
        if self._news:
            self._send_at(min(one.due for one in self._news.values()))


def _num_bytes(update: PeerUpdate) -> int:
    return len(update.peer_info) + len(update.fetch_peer_info) + len(update.share_peer_info)


def _note_problem(node: Node, other: Node, problem: str) -> None:
    """Store and log why two nodes are not paired."""
    report = PeerReport("", False, problem=problem)
    node.reports[other.engine_id] = other.reports[node.engine_id] = report
    is_other_revision = node.registration.revision != other.registration.revision
    # During a rollout, nodes of different revisions join on purpose, so do not warn.
    level = logging.DEBUG if is_other_revision else logging.WARNING
    logger.log(level, "%s and %s are not paired: %s", node.name, other.name, problem)
