"""Pairing: which nodes are compatible with each other, and which of these are connected."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from baton.link.words import (
    REVISION,
    NodeRegistration,
    NodeRole,
    PeerReport,
    PeerUpdate,
)
from router.fleet.node import Node

MAX_SAID_CHARS = 128
_PAIRED = ({NodeRole.PREFILL, NodeRole.DECODE}, {NodeRole.ENCODE, NodeRole.PREFILL})


def may_meet(one: NodeRegistration, other: NodeRegistration) -> bool:
    """Return whether two nodes may exchange KV or encodings, by their roles and options."""
    if one.role is other.role:
        return False
    if one.role is not NodeRole.ENCODE and other.role is not NodeRole.ENCODE:
        return True
    receiver = other if one.role is NodeRole.ENCODE else one
    return receiver.role is NodeRole.PREFILL and bool(receiver.encodings_peer_info)


def may_fetch(one: NodeRegistration, other: NodeRegistration) -> bool:
    """Return whether one of two nodes may send cached prefixes to the other, by their ends."""
    return bool(
        (one.fetch_peer_info and other.share_peer_info)
        or (one.share_peer_info and other.fetch_peer_info)
    )


def incompatibility(one: NodeRegistration, other: NodeRegistration) -> str:
    """Return the first entry of ``compatibility`` that keeps two nodes from being paired.

    Returns an empty text if there is none. With an encode node, only the entries that the encode
    node has are compared, because encodings depend on them alone.
    """
    # Compare identities first: that is fast for mappings that the pool shares
    if one.compatibility is other.compatibility or one.compatibility == other.compatibility:
        return ""
    keys = one.compatibility.keys() | other.compatibility.keys()
    for node in (one, other):
        if node.role is NodeRole.ENCODE:
            keys = set(node.compatibility)
    # The revision comes first, because another revision may be the reason for other differences.
    for key in sorted(keys, key=lambda key: (key != REVISION, key)):
        mine, theirs = one.compatibility.get(key), other.compatibility.get(key)
        if mine != theirs:
            return (
                f"{_short(key)} differs: {one.node_name} has {_short(mine)}, "
                f"{other.node_name} has {_short(theirs)}"
            )
    return ""


def _short(said: str | None) -> str:
    """Shorten a node's text, because a report with this text is kept for each pair of nodes."""
    text = str(said)
    return text if len(text) <= MAX_SAID_CHARS else f"{text[:MAX_SAID_CHARS]}..."


def update_about(node: Node, reader: Node) -> PeerUpdate:
    """Return the message that tells ``reader`` how to connect to ``node``."""
    own, readers = node.registration, reader.registration
    info = own.encodings_peer_info if readers.role is NodeRole.ENCODE else own.peer_info
    return PeerUpdate(
        node.engine_id,
        info if may_meet(own, readers) else b"",
        fetch_peer_info=own.fetch_peer_info if readers.share_peer_info else b"",
        share_peer_info=own.share_peer_info if readers.fetch_peer_info else b"",
    )


def are_peers(one: Node, other: Node, *, by_prefixes: bool = False) -> bool:
    """Return whether two nodes were introduced to each other.

    Args:
        by_prefixes: whether to ask about cached prefixes, rather than hand-offs or encodings.
    """
    may = may_fetch if by_prefixes else may_meet
    pair = one.registration, other.registration
    return may(*pair) and not incompatibility(*pair)


def receives_from(prefill: Node, encode: Node) -> bool:
    """Return whether a prefill node reports that it is connected to an encode node.

    The encode node's own report is not enough: it may come first, and the prefill node gives up an
    encoding from a node to which it is not connected yet.
    """
    report = prefill.reports.get(encode.engine_id)
    return report is not None and report.connected


def num_pairs_lost(nodes: Iterable[Node], lost: Iterable[NodeRegistration]) -> int:
    """Count pairs that are not connected because one of the two nodes left unexpectedly.

    No node reports on a lost node. So each lost node counts as a pair with every node of the other
    role that has the same revision; a lost encode node, only with prefill nodes that receive
    encodings.
    """
    present: Counter[tuple[NodeRole, str, bool]] = Counter()
    for node in nodes:
        said = node.registration
        present[said.role, said.revision, bool(said.encodings_peer_info)] += 1
    return sum(
        count
        for one in lost
        for (other, revision, receives), count in present.items()
        if {one.role, other} in _PAIRED
        and revision == one.revision
        and (NodeRole.ENCODE not in (one.role, other) or receives or one.encodings_peer_info)
    )


def why_no_pair(
    prefills: Sequence[Node],
    decodes: Sequence[Node],
    is_eligible: Callable[[Node], bool],
    identity_problem: Callable[[Node], str],
) -> str:
    """Return a reason, in one line for a client, why no pair of nodes takes requests."""
    for nodes in ([*prefills, *decodes], prefills, decodes):
        foreign = [node for node in nodes if identity_problem(node)]
        if foreign and len(foreign) == len(nodes):
            kind = "" if len(prefills) + len(decodes) == len(nodes) else f"{_role_of(nodes[0])} "
            why = f"{nodes[0].name}: {identity_problem(nodes[0])}"
            return f"no {kind}node serves this model ({why})"
    for role, nodes in ((NodeRole.PREFILL, prefills), (NodeRole.DECODE, decodes)):
        if not nodes:
            return f"no {role.value} node has joined the router"
        if not any(map(is_eligible, nodes)):
            return f"no {role.value} node takes requests now: all of them drain or fail"
    for prefill in prefills:
        for decode in decodes:
            report = prefill.reports.get(decode.engine_id)
            if report is not None and report.problem:
                return f"{prefill.name} and {decode.name} are not paired: {report.problem}"
    return "no prefill node is connected to a decode node yet"


def _role_of(node: Node) -> str:
    return node.registration.role.value


class Reach:
    """Which nodes are connected, according to their latest reports.

    Attributes:
        bandwidths: sending node -> receiving node -> bytes per second (0: unknown), by engine ids.
            Encode nodes send to prefill nodes, and prefill nodes to decode nodes.
    """

    def __init__(self) -> None:
        self.bandwidths: dict[str, dict[str, float]] = {}
        # For each node: the other nodes of those pairs in which a node reports no connection
        self._down: dict[str, set[str]] = {}

    @property
    def num_down(self) -> int:
        """Number of pairs of which one node reports that it is not connected to the other."""
        return sum(map(len, self._down.values())) // 2  # each pair is in two sets

    def list_slowest(self, senders: Iterable[str], most: int) -> list[tuple[float, str, str]]:
        """Return bandwidth, sender and receiver of at most ``most`` pairs, the slowest first.

        Pairs whose bandwidth is unknown come last. A fleet may have a million pairs, so built-in
        functions find the highest bandwidth that is listed.
        """
        measured = [(one, self.bandwidths[one]) for one in senders if self.bandwidths.get(one)]
        rates = sorted(itertools.chain.from_iterable(found.values() for _, found in measured))
        num_unknown = bisect.bisect_right(rates, 0.0)
        limit = rates[num_unknown:][:most][-1] if num_unknown < len(rates) else 0.0

        def pairs(fits: Callable[[float], bool]) -> Iterator[tuple[float, str, str]]:
            for sender, reached in measured:
                if any(map(fits, set(reached.values()))):
                    yield from (
                        (rate, sender, receiver) for receiver, rate in reached.items() if fits(rate)
                    )

        slowest = sorted(pairs(lambda rate: 0 < rate < limit))
        for rest in (pairs(lambda rate: rate == limit > 0), pairs(lambda rate: not rate)):
            slowest += itertools.islice(rest, most - len(slowest))
        return slowest[:most]

    def note_report(self, one: Node, other: Node) -> None:
        """Update the state of a pair, because one of its nodes reported on the other."""
        self.note_reports(one, (other,))

    def note_reports(self, one: Node, others: Iterable[Node]) -> None:
        """Update the states of a node's pairs, because one node of each reported on the other.

        Called for a quarter of a million pairs after a large fleet's router has started again, so
        good pairs need few calls.
        """
        one_id, reports, down, rates = one.engine_id, one.reports, self._down, self.bandwidths
        is_decode = one.role is NodeRole.DECODE
        for other in others:
            other_id = other.engine_id
            there, back = reports.get(other_id), other.reports.get(one_id)
            sender, receiver = one_id, other_id
            # Encode nodes send to prefill nodes, and prefill nodes to decode nodes
            if is_decode or other.role is NodeRole.ENCODE:
                there, back, sender, receiver = back, there, other_id, one_id
            if (
                there is not None
                and there.connected
                and there.bandwidth_bytes_per_s
                and back is not None
                and back.connected
                and not back.problem
                and not down
                and (reached := rates.get(sender)) is not None
            ):
                reached[receiver] = there.bandwidth_bytes_per_s
                continue
            self.note(sender, receiver, there, back)
            if (there and not there.connected) or (back and not back.connected):
                down.setdefault(sender, set()).add(receiver)
                down.setdefault(receiver, set()).add(sender)
            elif down and receiver in down.get(sender, ()):
                down[sender].discard(receiver)
                down[receiver].discard(sender)

    def note(
        self, sender: str, receiver: str, there: PeerReport | None, back: PeerReport | None
    ) -> None:
        """Update the state of a pair from its nodes' latest reports on each other.

        A pair is connected if the sender reports a connection and the receiver reports no problem.

        Args:
            there: the sender's report on the receiver; None: no report yet.
            back: the receiver's report on the sender; None: no report yet.
        """
        reached = self.bandwidths.get(sender)
        if reached is None:
            reached = self.bandwidths[sender] = {}
        if there is not None and there.connected and (back is None or not back.problem):
            # Only the sender measures the bandwidth again after the self-test.
            told_back = back.bandwidth_bytes_per_s if back is not None else 0.0
            reached[receiver] = there.bandwidth_bytes_per_s or told_back
        else:
            reached.pop(receiver, None)

    def forget(self, engine_id: str) -> None:
        """Remove all pairs of a node that left."""
        self.bandwidths.pop(engine_id, None)
        for reached in self.bandwidths.values():
            reached.pop(engine_id, None)
        for other in self._down.pop(engine_id, ()):
            self._down[other].discard(engine_id)
