"""LostNodes: which nodes went away that nobody had told to, and when. Knows no living node.

Operators see those that did not come back; who looks for a request that ends nodes counts all.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from baton.checkpoint.model_identity import identity_of
from baton.link.words import NodeRegistration

SHOWN_S = 300.0
MAX_SHOWN = 256
MAX_LOSSES = 1024


class Loss(NamedTuple):
    """One node's; ``at``: by the pool's clock."""

    at: float
    engine_id: str


class LostNodes:
    """Of one router.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._losses: deque[Loss] = deque(maxlen=MAX_LOSSES)  # oldest first
        self._missing: dict[str, tuple[float, NodeRegistration]] = {}  # by name, oldest first

    def note_loss(self, engine_id: str) -> None:
        """A node went away by itself."""
        self._losses.append(Loss(self._clock(), engine_id))

    def lost_since(self, at: float) -> set[str]:
        """Engine ids of the nodes that went away since then."""
        return {loss.engine_id for loss in self._losses if loss.at >= at}

    @property
    def last_loss_at(self) -> float:
        """When the last one went away; a time long ago if none did."""
        return self._losses[-1].at if self._losses else float("-inf")

    def note_missing(self, registration: NodeRegistration) -> None:
        """A node went away by itself: kept for operators, without what only peers need."""
        identity = dict(identity_of(registration.compatibility))
        known = dataclasses.replace(registration, peer_info=b"", compatibility=identity)
        self.forget(registration.node_name)
        self._missing[registration.node_name] = (self._clock(), known)
        if len(self._missing) > MAX_SHOWN:
            del self._missing[next(iter(self._missing))]

    def forget(self, name: str) -> None:
        """A node of that name is here, or not awaited; harmless when it is not known."""
        self._missing.pop(name, None)

    @property
    def missing(self) -> list[NodeRegistration]:
        """Those that went away in the last minutes and did not come back."""
        oldest = self._clock() - SHOWN_S
        self._missing = {name: item for name, item in self._missing.items() if item[0] > oldest}
        return [registration for _, registration in self._missing.values()]
