"""Switch: turns reading or writing of files off after a failure, and on again after a while."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 10.0
MOST_PAUSE_S = 300.0


class Switch:
    """State of one direction of the tier: on or off.

    If the first try after a pause fails, too, the next pause is twice as long.

    Args:
        what: name for log lines, such as "reading KV from files".
        clock: returns seconds, never going back.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._off_until = 0.0
        self._pause_s = 0.0

    @property
    def is_on(self) -> bool:
        """Return whether work may be tried; false only during a pause."""
        return self._clock() >= self._off_until

    def fail(self, problem: str) -> None:
        """Turn off for a while. Only the first of several failures in a row is logged.

        Failures during a pause have no effect: they belong to tries that began before the pause.
        """
        if not self.is_on:
            return
        if not self._pause_s:
            logger.warning("%s is off for a while: %s", self._what, problem)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MOST_PAUSE_S)
        self._off_until = self._clock() + self._pause_s

    def succeed(self) -> None:
        """Note that a try has worked."""
        if self._pause_s:
            logger.info("%s works again", self._what)
        self._pause_s = self._off_until = 0.0
