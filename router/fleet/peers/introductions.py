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
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
# time for other work. With its answer, a message takes about 0.5 ms of the router.
MESSAGES_PER_S = 500.0
# Seconds for which news wait for further news if they only list peers to which the reader is
# connected. After a restart of a router, its nodes join again one after another, and no node needs
# this news soon (`baton.link.router_links.UNLISTED_S`).
KNOWN_S = 10.0
# Maximum bytes of peer infos in one message; a longer message would delay beats and commands.
MAX_NEWS_BYTES = 2**20
# Maximum number of one node's reports on peers that have not joined yet, and for how many seconds
# they are kept. After a restart of a router, its nodes join again within seconds.
MAX_EARLY, EARLY_S = 4096, 60.0
# No further peers are counted as awaited once this many are. A router has at most as many nodes.
MAX_AWAITED = 4096


@dataclass(slots=True, eq=False)
class _News:
    """The news about peers that one node, the reader, must get.

    Attributes:
        due: time of the event loop at which the news are sent.
        joined: updates about peers that joined, by engine id; None: the reader is connected to the
            peer already.
        removed: engine ids of peers that left; sent before ``joined``.
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


class _Kind(NamedTuple):
    """The facts that decide which peers a node has; nodes of equal kinds have the same peers.

    Attributes:
        compatibility: identity of the mapping, which equal nodes share.
        encodings, fetches, shares: whether the node has this end for its peers.
    """

    role: str
    compatibility: int
    batches_peers: bool
    encodings: bool
    fetches: bool
    shares: bool


def _kind_of(node: Node) -> _Kind:
    said = node.registration
    ends = (said.encodings_peer_info, said.fetch_peer_info, said.share_peer_info)
    return _Kind(said.role.value, id(said.compatibility), said.batches_peers, *map(bool, ends))


class _EarlyReports:
    """Nodes' first reports on peers that have not joined yet; kept for `EARLY_S`."""

    def __init__(self) -> None:
        # For each reporting node, the oldest first: until when, and the reports by peer
        self._by: dict[str, tuple[float, dict[str, PeerReport]]] = {}
        # Peers that were reported and have not joined. A peer stays even if all reports on it were
        # dropped, until no node's reports are left.
        self._awaited: set[str] = set()

    def count_awaited(self, now: float) -> int:
        """Return the number of peers that were reported and have not joined."""
        self._drop_old(now)
        return len(self._awaited)

    def add(self, engine_id: str, reports: Iterable[PeerReport], now: float) -> None:
        """Keep a node's reports on peers to which the node is connected, at most `MAX_EARLY`."""
        self._drop_old(now)
        connected = (one for one in reports if one.connected and not one.problem)
        kept = {one.engine_id: one for one in itertools.islice(connected, MAX_EARLY)}
        if kept:
            self._by[engine_id] = (now + EARLY_S, kept)
            if len(self._awaited) < MAX_AWAITED:
                self._awaited.update(kept)

    def move(self, node: Node, others: Iterable[Node]) -> None:
        """Move the reports of other nodes on a node that joins to these nodes' reports."""
        own_id, kept_by = node.engine_id, self._by
        if not kept_by:
            return
        for other in others:
            kept = kept_by.get(other.engine_id)
            if kept is not None and (report := kept[1].pop(own_id, None)) is not None:
                other.reports[own_id] = report

    def note_joined(self, engine_id: str) -> None:
        """Note that a node has joined, so that it is not awaited any more."""
        self._awaited.discard(engine_id)

    def drop_node(self, engine_id: str) -> None:
        """Remove a node's own reports."""
        self._by.pop(engine_id, None)
        if not self._by:
            self._awaited.clear()

    def _drop_old(self, now: float) -> None:
        """Remove the reports that were kept for `EARLY_S`."""
        while self._by:
            oldest, (until, _) = next(iter(self._by.items()))
            if until > now:
                break
            self.drop_node(oldest)


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
        # Introduced nodes by kind, and by engine id; a kind without nodes is removed
        self._of_kind: dict[_Kind, dict[str, Node]] = {}
        self._early = _EarlyReports()
        self._news: dict[str, _News] = {}  # by engine id of the reader
        self._sending: asyncio.Handle | None = None  # the next call of `_send_news`
        # Times of the event loop: of this next call, and before which no message may be sent
        self._sending_at = math.inf
        self._rest_until = -math.inf

    # ------------------------------------------------------------------ nodes

    @property
    def num_awaited(self) -> int:
        """Number of nodes that nodes lately reported as connected, and that have not joined."""
        return self._early.count_awaited(self._clock())

    def add_node(self, node: Node) -> None:
        """Introduce a node that joined, unless it will send `PeerReports` first."""
        if not node.registration.batches_peers:
            self._introduce(node)

    def has_introduced(self, node: Node) -> bool:
        """Return whether the node was introduced to its peers."""
        return node.engine_id in self._here

    def note_reports(self, node: Node, strangers: Iterable[PeerReport]) -> bool:
        """Introduce a node that has sent `PeerReports`, if these are its first.

        Returns whether the node was introduced now.

        Args:
            strangers: the node's reports on peers that have not joined.
        """
        if self.has_introduced(node):
            return False
        self._early.add(node.engine_id, strangers, self._clock())
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
                self._tell_both(node, [peer])

    def remove_node(self, node: Node) -> None:
        """Forget a node that left, and tell its peers."""
        self._early.drop_node(node.engine_id)
        self._news.pop(node.engine_id, None)
        was_introduced = self._here.pop(node.engine_id, None) is not None
        if was_introduced:
            alike = self._of_kind[_kind_of(node)]
            del alike[node.engine_id]
            if not alike:
                del self._of_kind[_kind_of(node)]
        for other in self._peers_of(node):
            other.reports.pop(node.engine_id, None)
            if not was_introduced:
                continue
            if not other.registration.batches_peers:
                other.send(PeerUpdate(node.engine_id, removed=True))
                continue
            news = self._news_for(other, _due_in(0.0))
            news.joined.pop(node.engine_id, None)
            news.removed[node.engine_id] = None

    # ------------------------------------------------------------------ inside

    def _introduce(self, node: Node) -> None:
        """Tell a node about its compatible peers, and the peers about the node."""
        said = node.registration
        for alike in self._of_kind.values():
            others = list(alike.values())
            theirs = others[0].registration
            meets = may_meet(said, theirs)
            if not (meets or may_fetch(said, theirs)):
                continue
            if not incompatibility(said, theirs):
                if meets:
                    self._early.move(node, others)
                self._introduce_to(node, others)
            # Log no problem of two nodes that could only exchange cached prefixes.
            elif meets:
                for other in others:
                    problem = incompatibility(said, other.registration)
                    _note_problem(node, other, problem)
        self._early.note_joined(node.engine_id)
        self._here[node.engine_id] = node
        self._of_kind.setdefault(_kind_of(node), {})[node.engine_id] = node

    def _introduce_to(self, node: Node, others: Sequence[Node]) -> None:
        """Introduce a node and compatible nodes of one kind to each other.

        If both nodes of a pair have reported that they are connected to each other, they are only
        told each other's names. If only one of them has, both get full updates, because they then
        connect faster; the pair gets no requests until both have reported again.
        """
        own_id, reports = node.engine_id, node.reports
        connected, others_left = list[Node](), list[Node]()
        for other in others:
            there, back = other.reports.get(own_id), reports.get(other.engine_id)
            if there is not None and back is not None and there.connected and back.connected:
                connected.append(other)
            else:
                others_left.append(other)
                if there is not None or back is not None:
                    self._forget_reports(node, other)
        self._reach.note_reports(node, connected)
        # These reports do not cover ends for cached prefixes, so nodes with such ends get full
        # updates.
        if may_fetch(node.registration, others[0].registration):
            self._tell_both(node, others)
        else:
            self._tell_both(node, connected, are_known=True)
            self._tell_both(node, others_left)

    def _peers_of(self, node: Node) -> list[Node]:
        said, found = node.registration, list[Node]()
        for alike in self._of_kind.values():
            theirs = next(iter(alike.values())).registration
            if may_meet(theirs, said) or may_fetch(theirs, said):
                found += [one for one in alike.values() if one is not node]
        return found

    def _forget_reports(self, one: Node, other: Node) -> None:
        """Forget what two nodes reported on each other, because they will meet again."""
        one.reports.pop(other.engine_id, None)
        other.reports.pop(one.engine_id, None)
        self._reach.note_report(one, other)

    def _tell_both(self, node: Node, others: Sequence[Node], *, are_known: bool = False) -> None:
        """Tell a node about compatible peers of one kind, and each peer about the node.

        Args:
            are_known: whether the node is connected to the peers; then they are only listed.
        """
        if not others:
            return
        wait_s = KNOWN_S if are_known else 0.0
        updates = [None if are_known else update_about(other, node) for other in others]
        if node.registration.batches_peers:
            ids = [other.engine_id for other in others]
            self._news_for(node, _due_in(wait_s)).joined.update(zip(ids, updates, strict=True))
        else:
            for other in others:
                node.send(update_about(other, node))
        own = None if are_known else update_about(node, others[0])
        if others[0].registration.batches_peers:
            due, own_id, all_news = _due_in(wait_s), node.engine_id, self._news
            for other in others:
                news = all_news.get(other.engine_id)
                if news is None or due < news.due:
                    news = self._news_for(other, due)
                news.joined[own_id] = own
        else:
            for other in others:
                other.send(update_about(node, other))

    def _news_for(self, reader: Node, due: float) -> _News:
        """Return the news for a node, which are sent at the time ``due`` or before."""
        news = self._news.get(reader.engine_id)
        if news is None:
            news = self._news[reader.engine_id] = _News(reader)
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


def _due_in(wait_s: float) -> float:
    """Return the time of the event loop in ``wait_s`` seconds."""
    return asyncio.get_running_loop().time() + wait_s


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
