"""Which nodes may work together: those that fit, and of them those that reach each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.link import NodeRegistration, NodeRole, PeerReport
from router.node import Node


def incompatibility(one: NodeRegistration, other: NodeRegistration) -> str:
    """Why two nodes must not be paired, naming the first thing that differs; empty if nothing."""
    for key in sorted(one.compatibility.keys() | other.compatibility.keys()):
        mine, theirs = one.compatibility.get(key), other.compatibility.get(key)
        if mine != theirs:
            return f"{key} differs: {one.node_name} has {mine}, {other.node_name} has {theirs}"
    return ""


def why_no_pair(
    prefills: Sequence[Node], decodes: Sequence[Node], is_eligible: Callable[[Node], bool]
) -> str:
    """One line for a client when no two nodes may work together."""
    for role, nodes in ((NodeRole.PREFILL, prefills), (NodeRole.DECODE, decodes)):
        if not nodes:
            return f"no {role.value} node has joined the router"
        if not any(map(is_eligible, nodes)):
            return f"no {role.value} node takes requests now: they drain or fail"
    for prefill in prefills:
        for decode in decodes:
            report = prefill.reports.get(decode.engine_id)
            if report is not None and report.problem:
                return f"{prefill.name} and {decode.name} are not paired: {report.problem}"
    return "no prefill node is connected to a decode node yet"


class Reach:
    """Who reaches whom, kept as reports come.

    Attributes:
        bandwidths: prefill node -> decode node -> bytes per second (0: unknown), by engine id.
    """

    def __init__(self) -> None:
        self.bandwidths: dict[str, dict[str, float]] = {}

    def note(
        self, prefill: str, decode: str, there: PeerReport | None, back: PeerReport | None
    ) -> None:
        """What two nodes say of each other now.

        They are a pair when the prefill node says yes and the decode node does not say no.
        """
        reached = self.bandwidths.setdefault(prefill, {})
        if there is not None and there.connected and (back is None or not back.problem):
            known = [report.bandwidth_bytes_per_s for report in (there, back) if report]
            reached[decode] = max(known)
        else:
            reached.pop(decode, None)

    def forget(self, engine_id: str) -> None:
        """A node went away."""
        self.bandwidths.pop(engine_id, None)
        for reached in self.bandwidths.values():
            reached.pop(engine_id, None)
