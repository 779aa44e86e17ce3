"""Rollout: decides which revisions of nodes get requests, and which share of the requests.

    revision    nodes started with one --revision; only nodes of one revision are paired
    complete    a prefill and a decode node of the revision are connected and may get requests
    serving     complete and not undone; without such a revision, undone ones serve, too
    share       part of new requests: the smaller of the revision's parts of prefill and decode
                capacity

    steady      one revision serves
    rolling     several revisions serve
    paused      shares are frozen, even if nodes join or leave
    undone      an operator has undone a revision: it gets nothing while another one is complete

A prefill node's capacity is its weight, which depends on its health; a decode node's capacity is
its weight times its KV memory. When nodes join or leave, the shares follow, so rolling back works
like rolling forward.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from baton.api.errors import InvalidRequestError, NotFoundError
from baton.link.beat_interval import BEAT_INTERVAL_S
from router.fleet.fleet import NO_FLEET, Fleet
from router.fleet.load.node_load import NodeLoad

logger = logging.getLogger(__name__)

# Maximum number of revisions without nodes that are remembered, undone revisions not counted.
MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class RevisionView:
    """The current state of one revision.

    Attributes:
        name: the revision's name; empty for nodes without a revision.
        state: serving, incomplete or undone.
        share: the revision's share of new requests.
        num_prefill, num_decode: number of nodes that may get requests.
        num_placed: number of requests that were given to this revision while several served.
    """

    name: str
    state: str
    share: float
    num_prefill: int
    num_decode: int
    num_placed: int


class Rollout:
    """Divides requests among the revisions of one base model's nodes.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[str] = []  # revisions of nodes that have joined, the newest last
        self._undone: set[str] = set()
        self._held: Mapping[str, float] | None = None  # shares while paused
        # Fleet of each serving revision; empty if there is only one revision
        self._parts: Mapping[str, Fleet] = {}
        self._credits: dict[str, float] = {}
        self._shares: Mapping[str, float] = {}
        self._shares_at = -math.inf
        self.num_placed: Counter[str] = Counter()

    # ------------------------------------------------------------------ nodes

    def knows(self, revision: str) -> bool:
        """Return whether a node of this revision has joined and the revision is remembered."""
        return revision in self._seen

    def note_joined(self, revision: str, here: Collection[str] = ()) -> None:
        """Note the revision of a node that joined; a new revision is the newest.

        Forgets the oldest revisions without nodes, except undone ones, if too many are remembered.

        Args:
            here: revisions of all nodes that have joined.
        """
        if revision not in self._seen:
            self._seen.append(revision)
            if len(self._seen) > 1:
                logger.info("a node of another revision joined: %s", revision or "without one")
            gone = [
                name for name in self._seen[:-1] if name not in here and name not in self._undone
            ]
            for forgotten in gone[: max(len(gone) - MAX_REMEMBERED + 1, 0)]:
                self._seen.remove(forgotten)
                self.num_placed.pop(forgotten, None)

    def admit(self, fleet: Fleet) -> Fleet:
        """Return the fleet of only those nodes whose revision gets requests."""
        self._parts, self._shares_at = {}, -math.inf
        names = _revisions_in(fleet)
        if len(names) <= 1:
            return fleet
        parts = dict(sorted(fleet.by_revision().items()))
        complete = {name: part for name, part in parts.items() if part.prefills}
        serving = {name: complete[name] for name in complete if name not in self._undone}
        serving = serving or complete
        if not serving:  # no revision has a pair: all nodes that work alone may serve
            return fleet
        self._parts = serving
        if len(serving) == len(names):
            return fleet

        def serves(node: NodeLoad) -> bool:
            return node.revision in serving

        return fleet.only(serves, serves)

    def may_serve(self, revision: str) -> bool:
        """Return whether a revision may get requests: no operator has undone it."""
        return revision not in self._undone

    def choose(self, session_id: str = "") -> Fleet | None:
        """Return the fleet of the revision that gets the next request; None: only one serves.

        Requests of one session stay with one revision as long as its share permits, because their
        prefix is cached on its nodes.
        """
        if len(self._parts) <= 1:
            return None
        shares = self.shares()
        name = _of_session(session_id, shares) if session_id else self._next_turn(shares)
        self.num_placed[name] += 1
        return self._parts[name]

    def _next_turn(self, shares: Mapping[str, float]) -> str:
        """Return the revision that gets the next request, so that the shares are kept evenly."""
        credits = {name: self._credits.get(name, 0.0) + share for name, share in shares.items()}
        name = max(credits, key=lambda one: (credits[one], one))
        credits[name] -= 1.0
        self._credits = credits
        return name

    def shares(self) -> Mapping[str, float]:
        """Return each revision's share of new requests, summing to 1; empty if only one serves."""
        if len(self._parts) <= 1:
            return {}
        now = self._clock()
        # Nodes' weights change with time, not only when the fleet changes
        if now - self._shares_at >= BEAT_INTERVAL_S:
            self._shares, self._shares_at = self._current_shares(), now
        return self._shares

    def _current_shares(self) -> Mapping[str, float]:
        shares = _shares_of_capacity(self._parts)
        if self._held is not None:
            held = {name: self._held.get(name, 0.0) for name in shares}
            if sum(held.values()) > 0:  # the sum is 0 if no revision with a frozen share serves
                shares = held
        total = sum(shares.values())
        return {name: share / total for name, share in shares.items()}

    # ------------------------------------------------------------------ operators

    @property
    def state(self) -> str:
        """State of the rollout: steady, rolling, paused or undone."""
        if self._undone:
            return "undone"
        if self._held is not None:
            return "paused"
        return "rolling" if len(self._parts) > 1 else "steady"

    def pause(self) -> None:
        """Freeze the shares, so that new revisions get no requests until `resume`.

        If no revision with a frozen share serves, the shares follow capacity all the same.
        """
        shares = self.shares() or dict.fromkeys(self._parts or self._seen, 1.0)
        self._held, self._shares_at = dict(shares), -math.inf

    def undo(self, revision: str | None = None) -> str:
        """Give a revision no new requests while another revision is complete, until `resume`.

        Args:
            revision: name of the revision; None: the newest one.

        Returns the revision's name. Raises NotFoundError if there is no such revision, and
        InvalidRequestError if there is only one revision.
        """
        if len(self._seen) < 2:
            raise InvalidRequestError("revision", "there is only one, so none can be undone")
        name = self._seen[-1] if revision is None else revision
        if name not in self._seen:
            known = ", ".join(one or '""' for one in self._seen)
            raise NotFoundError(f"there is no revision {name!r}; there are {known}")
        self._undone.add(name)
        self._held = None
        return name

    def resume(self) -> None:
        """Let the shares follow capacity again, and allow all undone revisions."""
        self._undone.clear()
        self._held, self._shares_at = None, -math.inf

    def view(self, nodes: Iterable[NodeLoad], fleet: Fleet) -> list[RevisionView]:
        """Return the state of each revision that has a joined node, the newest last.

        Args:
            nodes: all joined nodes.
            fleet: the current fleet, from `admit`.
        """
        here = {node.revision for node in nodes}
        shares = self.shares() or dict.fromkeys(_revisions_in(fleet), 1.0)
        parts, views = fleet.by_revision(), []
        for name in (one for one in self._seen if one in here):
            part = parts.get(name, NO_FLEET)
            state = "serving" if part else "undone" if name in self._undone else "incomplete"
            views.append(
                RevisionView(
                    name,
                    state,
                    shares.get(name, 0.0),
                    len(part.prefills),
                    len(part.decodes or part.self_prefilling),
                    self.num_placed[name],
                )
            )
        return views


def _revisions_in(fleet: Fleet) -> set[str]:
    nodes = (*fleet.prefills, *fleet.decodes, *fleet.self_prefilling)
    return {node.revision for node in nodes}


def _shares_of_capacity(parts: Mapping[str, Fleet]) -> dict[str, float]:
    """Return for each revision the smaller of its parts of all prefill and decode capacity.

    The result need not sum to 1.
    """
    prefill = {name: sum(node.weight for node in part.prefills) for name, part in parts.items()}
    decode = {name: sum(map(_decode_capacity, part.decodes)) for name, part in parts.items()}
    of_prefill, of_decode = sum(prefill.values()), sum(decode.values())
    return {name: min(prefill[name] / of_prefill, decode[name] / of_decode) for name in parts}


def _decode_capacity(node: NodeLoad) -> float:
    return node.weight * node.num_blocks * node.block_size


def _of_session(session_id: str, shares: Mapping[str, float]) -> str:
    """Choose a session's revision by weighted rendezvous hashing.

    When the shares change, few sessions move to another revision.
    """

    def score(name: str) -> float:
        digest = hashlib.blake2b(f"{session_id}\0{name}".encode(errors="surrogatepass"))
        drawn = (int.from_bytes(digest.digest()[:8], "big") + 1) / (2**64 + 1)
        return shares[name] / -math.log(drawn) if shares[name] else -1.0

    return max(shares, key=lambda name: (score(name), name))
