"""NodeHealth: ejects a failing node for a while, and limits the requests of a new node.

    SERVING -- failures, or no progress --> EJECTED -- after a pause that doubles --> CANARY
       ^                                                                                |
       `-- more and more for 10 s -- WARMING <-- it answered ------- one request at a time

A node that joins while other nodes of its role have requests also begins as a canary.
`fleet_choice.py` decides which nodes get requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

FAILURES = 3  # a node is ejected after this many failures without a success in between
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
WARMING_S = 10.0
LEAST_WEIGHT = 0.2


class HealthState(Enum):
    """The states of one node's health, as one router judges it."""

    SERVING = "serving"
    EJECTED = "ejected"
    CANARY = "canary"
    WARMING = "warming"


class NodeHealth:
    """Tracks the health of one node.

    Args:
        name: the node's name, for the log.
        on_change: called when the node may have become usable or unusable.
        is_canary: whether the node gets one request at a time until it has answered one.
        clock: returns monotonic seconds.

    Attributes:
        why: reason of the last ejection; empty: never ejected.
    """

    def __init__(
        self,
        name: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        is_canary: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = HealthState.CANARY if is_canary else HealthState.SERVING
        self.why = ""
        self._name = name
        self._on_change = on_change
        self._clock = clock
        self._until = 0.0  # when the pause or the warm-up ends
        self._num_pauses = 0  # number of ejections since the node was last healthy for long
        # Engine ids of the partner nodes in the failures since the last success. "" stands for a
        # failure of this node alone.
        self._partners: list[str] = []

    @property
    def weight(self) -> float:
        """Share of a healthy node's load that this node should get, above 0 up to 1."""
        if self.state is HealthState.CANARY:
            return LEAST_WEIGHT
        if self.state is HealthState.WARMING:
            done = 1 - max(self._until - self._clock(), 0.0) / WARMING_S
            return LEAST_WEIGHT + (1 - LEAST_WEIGHT) * done
        return 1.0

    def is_unwanted(self, num_open: int) -> bool:
        """Return whether the node is ejected, or is a canary that already has an open request."""
        if self.state is HealthState.CANARY:
            return num_open > 0
        return self.state is HealthState.EJECTED

    def note_open(self, num_open: int) -> None:
        """Note how many requests are open on this node, after one was placed or closed."""
        if self.state is HealthState.CANARY and num_open <= 1:
            self._on_change()

    def note_success(self) -> None:
        """Note that the node computed the first token of a request."""
        self._partners.clear()
        if self.state is HealthState.CANARY:
            self._set(HealthState.WARMING, WARMING_S)

    def note_failure(self, partner: str, why: str) -> None:
        """Note a failed attempt; enough of them eject the node.

        Args:
            partner: engine id of the attempt's other node, if that node may be to blame. Failures
                with partners count only once they had different partners. Empty: only this node is
                to blame.
            why: the error, for the log and for operators.
        """
        if self.state is HealthState.EJECTED:
            return
        self._partners.append(partner)
        is_blamed = "" in self._partners or len(set(self._partners)) > 1
        if is_blamed and (self.state is HealthState.CANARY or len(self._partners) >= FAILURES):
            self.eject(why)

    def eject(self, why: str) -> None:
        """Give the node no requests for a pause; each further pause is twice as long."""
        pause_s = min(FIRST_PAUSE_S * 2**self._num_pauses, LONGEST_PAUSE_S)
        self._num_pauses += 1
        self.why = why
        logger.warning("%s gets no requests for %g s: %s", self._name, pause_s, why)
        self._set(HealthState.EJECTED, pause_s)

    def tick(self) -> None:
        """End the pause or the warm-up if its time is up; called once per beat interval."""
        now = self._clock()
        if self.state is HealthState.SERVING and now > self._until + LONGEST_PAUSE_S:
            self._num_pauses = 0
        if now < self._until:
            return
        if self.state is HealthState.EJECTED:
            self._partners.clear()
            self._set(HealthState.CANARY, 0.0)
        elif self.state is HealthState.WARMING:
            self._set(HealthState.SERVING, 0.0)

    def _set(self, state: HealthState, for_s: float) -> None:
        self.state, self._until = state, self._clock() + for_s
        self._on_change()
