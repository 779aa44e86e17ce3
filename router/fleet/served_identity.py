"""ServedIdentity: decides which nodes serve a base model, by the identity of their model.

    some nodes match the router's own model folder        these nodes serve
    the last node of the served identity drains or is     another identity may serve
    removed
    the last node of the served identity is lost          the router waits for its return

If the folder has no weight files, nodes with any weights match it. Nodes that join by mistake or
too early get no requests, and nodes with new weights serve once the old nodes have drained. For
`SETTLE_S` after the first join, an identity with more nodes replaces an identity with fewer, so the
order of joins after a restart does not matter.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from baton.checkpoint.model_identity import (
    IDENTITY_KEYS,
    SIMULATED,
    Identity,
    describe_identity,
)
from baton.link.words import NodeRole
from router.fleet.node import Node

logger = logging.getLogger(__name__)

SETTLE_S = 2.0


class ServedIdentity:
    """Chooses which model identity of the nodes is served as one base model.

    Args:
        own: entries that follow from the base model's folder; ``weights`` only if it has weight
            files.
        clock: returns monotonic seconds.

    Attributes:
        served: the served identity, even while all its nodes are lost; None before the first
            choice.
        num_changes_total: how often another identity replaced the served one.
    """

    def __init__(self, own: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self.served: Identity | None = None
        self.num_changes_total = 0
        self._own = {key: own[key] for key in IDENTITY_KEYS if key in own}
        self._clock = clock
        self._settled_at = math.inf  # `SETTLE_S` after the first node joined; infinite before
        # Whether the last node of the served identity drained or was removed
        self._is_given_up = False

    @property
    def own(self) -> Mapping[str, str]:
        """Entries of the identity that follow from the router's own model folder."""
        return self._own

    def admits(self, node: Node) -> bool:
        """Return whether a node's model identity is the served one.

        Of an encode node, only the entries that it has are compared.
        """
        if node.registration.role is NodeRole.ENCODE:
            served = dict(self.served or ())
            return all(served.get(key) == one for key, one in node.identity if one)
        return node.identity == self.served

    def follow_nodes(self) -> None:
        """Accept nodes whose weights differ from the folder's, because an operator changes weights.

        Otherwise the first node with the folder's weights would replace the nodes with new weights.
        """
        self._own.pop("weights", None)

    def problem(self, node: Node) -> str:
        """Return why a node gets no requests: the entry that differs; empty if it gets requests."""
        if self.admits(node):
            return ""
        theirs = dict(node.identity)
        # An encode node lacks entries about KV and adapters
        if node.registration.role is NodeRole.ENCODE:
            theirs = {**dict(self.served or ()), **{key: one for key, one in theirs.items() if one}}
        for key, value in self._own.items():
            if not _fits(key, theirs.get(key, ""), value):
                return f"{key} differs: it has {theirs[key]}, this router's --model has {value}"
        for key, value in self.served or ():
            if theirs[key] != value:
                return f"{key} differs: it has {theirs[key]}, the nodes that serve have {value}"
        return "nothing is served yet"

    def review(
        self,
        nodes: Iterable[Node],
        *,
        left: Identity | None = None,
        joined: Identity | None = None,
    ) -> bool:
        """Choose the served identity anew after a node joined, left or began to drain.

        Returns whether the choice changed.

        Args:
            nodes: all joined nodes; encode nodes do not influence the choice.
            left: identity of a node that has just left because an operator or its drain ended it;
                None: no such node.
            joined: identity of a node that has just joined; None: no such node.
        """
        # One more node of the served identity changes no choice; in a large fleet, most joins end
        # here.
        if joined is not None and joined == self.served and not self._is_given_up:
            return False
        num_active: Counter[Identity] = Counter()
        for node in nodes:
            if node.registration.role is NodeRole.ENCODE:
                continue
            if not node.is_draining:
                num_active[node.identity] += 1
            elif node.identity == self.served:
                left = node.identity
        if num_active and self._settled_at == math.inf:
            self._settled_at = self._clock() + SETTLE_S
        if self.served in num_active:
            self._is_given_up = False
        elif left is not None and left == self.served:
            self._is_given_up = True
        chosen = self._choose(num_active)
        if chosen is None or chosen == self.served:
            return False
        self._replace(chosen, num_active[chosen])
        return True

    def _choose(self, num_active: Counter[Identity]) -> Identity | None:
        """Return the identity to serve; None: keep the served one."""
        # Nodes with other weights may serve, but not nodes with another tokenizer than this
        # router's.
        usable = [one for one in num_active if self._has_own(one, without="weights")]
        preferred = [one for one in usable if self._has_own(one)]
        is_second_best = (
            bool(preferred) and self.served is not None and not self._has_own(self.served)
        )
        is_settled = self.served is not None and self._clock() >= self._settled_at
        if is_settled and not (is_second_best or self._is_given_up):
            return None
        candidates = usable if self._is_given_up and not preferred else preferred
        return min(candidates, key=lambda one: (-num_active[one], one), default=None)

    def _has_own(self, identity: Identity, *, without: str = "") -> bool:
        entries = dict(identity)
        return all(
            _fits(key, entries[key], value) for key, value in self._own.items() if key != without
        )

    def _replace(self, chosen: Identity, num_nodes: int) -> None:
        before, self.served = self.served, chosen
        self._is_given_up = False
        if before is None:
            logger.info("serves %s", describe_identity(chosen))
        else:
            self.num_changes_total += 1
            logger.warning(
                "serves another model from now on, on %d nodes: %s; before: %s",
                num_nodes,
                describe_identity(chosen),
                describe_identity(before),
            )
        if not self._has_own(chosen):
            logger.warning(
                "the --model of this router has other weights (%s): replace them by the nodes' "
                "weights, or after a restart the router will not serve these nodes",
                self._own["weights"],
            )


def count_fitting(own: Mapping[str, str], identity: Identity) -> int | None:
    """Return how many entries a model folder and a node's identity have in common.

    Returns None if an entry of the folder differs.
    """
    theirs = dict(identity)
    known = {key: own[key] for key in IDENTITY_KEYS if key in own}
    return len(known) if all(_fits(key, theirs[key], one) for key, one in known.items()) else None


def _fits(key: str, theirs: str, own: str) -> bool:
    return theirs == own or (key == "weights" and theirs == SIMULATED)
