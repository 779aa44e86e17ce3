"""LostNodes: records which nodes left unexpectedly, when, and which of them died.

For some time after its start, a router also expects newcomers: unknown nodes, which may have been
joined to the router that ran before.

A lost node is not always dead: links break and recover, and processes stall and continue.

    the same engine id joins again                 the node did not die
    another engine id joins under the same name    the node died
    nothing comes back for a while                 the node died

Operators see the nodes that did not come back; `Suspects` counts the deaths.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from baton.api.errors import NotFoundError
from baton.checkpoint.model_identity import identity_of
from baton.link.words import NodeRegistration, NodeRole

SHOWN_S = 300.0
MAX_SHOWN = 256
MAX_LOSSES = 1024
# A node counts as dead if it has not joined again after this many seconds.
RETURN_S = 15.0


class Fate(Enum):
    """Fates of a lost node: not known yet, came back, or died."""

    OPEN = "open"
    RETURNED = "returned"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Loss:
    """The unexpected leave of one node. Only `LostNodes` changes this object.

    Attributes:
        at: time of the loss, by the pool's clock.
        num_open: number of attempts that were open on the node.
        fate: what later joins have shown; `LostNodes.fate` also considers how much time has passed.
    """

    at: float
    engine_id: str
    node_name: str
    num_open: int
    fate: Fate = Fate.OPEN


@dataclass(frozen=True, slots=True)
class _Departure:
    """The last leave of a node: when, which process, and why, as in "it went away"."""

    at: float
    engine_id: str
    why: str


class LostNodes:
    """Remembers the nodes that one router lost.

    Args:
        clock: returns monotonic seconds.
        return_s: seconds after which a node that has not come back counts as dead.

    Attributes:
        newcomers_until: until when nodes that have never joined here are expected, by the clock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, return_s: float = RETURN_S
    ) -> None:
        self._clock = clock
        self._started_at = clock()
        self._return_s = return_s
        self._losses: deque[Loss] = deque(maxlen=MAX_LOSSES)  # the latest losses, oldest first
        # For each lost node's name, oldest first: when it left, and its registration
        self._missing: dict[str, tuple[float, NodeRegistration]] = {}
        self._left: dict[str, _Departure] = {}  # by name, oldest first; also nodes not expected
        self.newcomers_until = -math.inf

    def note_loss(self, engine_id: str, node_name: str = "", num_open: int = 0) -> None:
        """Record that a node left unexpectedly.

        Does nothing if a loss of this engine id is recorded whose fate is not known yet.
        """
        if not any(one.engine_id == engine_id for one in self._losses if self._is_open(one)):
            self._losses.append(Loss(self._clock(), engine_id, node_name, num_open))

    def note_joined(self, engine_id: str, node_name: str) -> None:
        """Set the fates of losses: the joined process lives, earlier processes of its name died."""
        self._left.pop(node_name, None)
        for loss in self._losses:
            if self._is_open(loss):
                if loss.engine_id == engine_id:
                    loss.fate = Fate.RETURNED
                elif loss.node_name == node_name:
                    loss.fate = Fate.DEAD

    def fate(self, loss: Loss) -> Fate:
        """Return what became of a lost node, as far as it is known now."""
        is_late = self._clock() >= loss.at + self._return_s
        return Fate.DEAD if loss.fate is Fate.OPEN and is_late else loss.fate

    def lost_since(self, at: float) -> list[Loss]:
        """Return the losses since ``at``, except those of nodes that came back."""
        return [one for one in self._losses if one.at >= at and one.fate is not Fate.RETURNED]

    @property
    def last_loss_at(self) -> float:
        """Time of the latest loss whose node has not come back; -inf: there is no such loss."""
        times = (one.at for one in reversed(self._losses) if one.fate is not Fate.RETURNED)
        return next(times, float("-inf"))

    def _is_open(self, loss: Loss) -> bool:
        return loss.fate is Fate.OPEN

    def note_left(self, engine_id: str, node_name: str, why: str) -> None:
        """Remember why a node left, whether or not it is expected to return."""
        self._left.pop(node_name, None)
        self._left[node_name] = _Departure(self._clock(), engine_id, why)
        if len(self._left) > MAX_SHOWN:
            del self._left[next(iter(self._left))]

    def why_left(self, name: str) -> str:
        """Return why the node with this name or engine id left; empty if no such node did."""
        left = self._find_left(name)
        return "" if left is None else f"it {left.why}, {self._clock() - left.at:.0f} s ago"

    def expect_newcomers(self, for_s: float) -> None:
        """Expect, for some seconds from now on, nodes that have never joined here.

        A router that starts again does not know the nodes of its predecessor. These nodes join
        again within a few seconds.
        """
        self.newcomers_until = self._clock() + for_s

    @property
    def expects_newcomers(self) -> bool:
        """Return whether nodes that have never joined here are expected now."""
        return self._clock() < self.newcomers_until

    @property
    def age_s(self) -> float:
        """Seconds since this router started."""
        return self._clock() - self._started_at

    def expected_for(self, name: str, return_s: float) -> float:
        """Return for how many seconds a lost or unknown node is still expected; 0: it is not.

        Args:
            name: the node's name or engine id.
            return_s: seconds in which a lost node may return.
        """
        left = self._find_left(name)
        if left is None:
            return max(self.newcomers_until - self._clock(), 0.0)
        if not any(name in (one.node_name, one.engine_id) for _, one in self._missing.values()):
            return 0.0
        return max(left.at + return_s - self._clock(), 0.0)

    def _find_left(self, name: str) -> _Departure | None:
        of_engine = (one for one in self._left.values() if one.engine_id == name)
        return self._left.get(name) or next(of_engine, None)

    def note_missing(self, registration: NodeRegistration) -> None:
        """Remember a node that left, without its peer info, so that operators see it as missing."""
        identity = dict(identity_of(registration.compatibility))
        known = dataclasses.replace(registration, peer_info=b"", compatibility=identity)
        self.forget(registration.node_name)
        self._missing[registration.node_name] = (self._clock(), known)
        if len(self._missing) > MAX_SHOWN:
            del self._missing[next(iter(self._missing))]

    def forget(self, name: str) -> None:
        """Stop listing a node as missing, because it is back or is not expected.

        Does nothing if no node of this name is missing.
        """
        self._missing.pop(name, None)

    @property
    def missing(self) -> list[NodeRegistration]:
        """Nodes that left unexpectedly in the last minutes and did not come back."""
        oldest = self._clock() - SHOWN_S
        self._missing = {name: item for name, item in self._missing.items() if item[0] > oldest}
        return [registration for _, registration in self._missing.values()]

    def missing_since(self, role: NodeRole) -> float:
        """Return when the last missing node of a role left; -inf if none is missing."""
        times = [at for at, one in self._missing.values() if one.role is role]
        return max(times, default=float("-inf"))


def no_such_node(name: str, *pools: LostNodes) -> NotFoundError:
    """Return the error for a node that is not here, with the reason.

    Args:
        pools: the nodes that each pool of the router lost.
    """
    reasons = filter(None, (pool.why_left(name) for pool in pools))
    never = f"none of this name has joined this router, which started {pools[0].age_s:.0f} s ago"
    return NotFoundError(f"there is no node {name!r}: {next(reasons, never)}")
