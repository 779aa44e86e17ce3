"""NodeHealth: whether a node is ejected for a while, and how much one that is new may get.

    SERVING -- failures, or no progress --> EJECTED -- after a pause that doubles --> CANARY
       ^                                                                                |
       `-- more and more for 10 s -- WARMING <-- it answered ------- one request at a time

A node that joins others at work begins as a canary, too. Says whether this one should get requests;
which of all of them do is chosen in `fleet_choice.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

FAILURES = 3  # without a success in between
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
WARMING_S = 10.0
LEAST_WEIGHT = 0.2


class HealthState(Enum):
    """Of one node, as this router sees it."""

    SERVING = "serving"
    EJECTED = "ejected"
    CANARY = "canary"
    WARMING = "warming"


class NodeHealth:
    """Of one node.

    Args:
        name: of the node.
        on_change: called when who should get requests may have changed.
        is_canary: whether it has to prove itself first.
        clock: seconds that never go back.

    Attributes:
        why: it was ejected last.
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
        self._until = 0.0  # the end of the pause, or of the warming up
        self._num_pauses = 0  # since it was well for as long as the longest pause
        self._partners: list[str] = []  # of failures since a success; "": its own fault

    @property
    def weight(self) -> float:
        """Share of its due, above 0 to 1."""
        if self.state is HealthState.CANARY:
            return LEAST_WEIGHT
        if self.state is HealthState.WARMING:
            done = 1 - max(self._until - self._clock(), 0.0) / WARMING_S
            return LEAST_WEIGHT + (1 - LEAST_WEIGHT) * done
        return 1.0

    def is_unwanted(self, num_open: int) -> bool:
        """Whether another node should get the next request, with so many open on this one."""
        if self.state is HealthState.CANARY:
            return num_open > 0
        return self.state is HealthState.EJECTED

    def note_open(self, num_open: int) -> None:
        """A request was placed there, or left it; so many are open."""
        if self.state is HealthState.CANARY and num_open <= 1:
            self._on_change()

    def note_success(self) -> None:
        """It did its part for a request: its first token came."""
        self._partners.clear()
        if self.state is HealthState.CANARY:
            self._set(HealthState.WARMING, WARMING_S)

    def note_failure(self, partner: str, why: str) -> None:
        """An attempt failed.

        Args:
            partner: engine id of the other node, where that may have been at fault as well: a
                node is blamed for what passes between two only when it happens with several.
                Empty: this node is at fault alone.
        """
        if self.state is HealthState.EJECTED:
            return
        self._partners.append(partner)
        is_blamed = "" in self._partners or len(set(self._partners)) > 1
        if is_blamed and (self.state is HealthState.CANARY or len(self._partners) >= FAILURES):
            self.eject(why)

    def eject(self, why: str) -> None:
        """Have others do its work for a while, each time for longer."""
        pause_s = min(FIRST_PAUSE_S * 2**self._num_pauses, LONGEST_PAUSE_S)
        self._num_pauses += 1
        self.why = why
        logger.warning("%s gets no requests for %g s: %s", self._name, pause_s, why)
        self._set(HealthState.EJECTED, pause_s)

    def tick(self) -> None:
        """End a pause, or the warming up, when it is time; to be called now and then."""
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
