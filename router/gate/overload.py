"""Overload: how close the router is to the limits of its process, and which requests it refuses.

    normal -> shed (less urgent requests are refused, connections are not kept open)
           -> critical (all requests are refused; health, operators and nodes are served)

Each signal, such as the share of used memory, has a level; the worst level counts. A level begins
at once, and ends when its signals have been well below it for a while. Measurements come through
`note`, and callers read `level`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from baton.api.errors import OverloadedError
from baton.processes.ticks import next_tick

logger = logging.getLogger(__name__)

HOLD_S = 2.0  # signals must stay well below a level for this many seconds before the level falls
_WELL_BELOW = 0.9  # a signal below this share of a threshold is well below it
_RETRY_DELAY_S = 2.0


class Level(IntEnum):
    """Levels of overload; the level decides what the router refuses."""

    NORMAL = 0
    SHED = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Threshold:
    """The values of a signal at which the levels ``shed`` and ``critical`` begin.

    Attributes:
        unit: unit of the values, to show them; empty: the values are shares, 1 being the whole.
    """

    shed: float
    critical: float
    unit: str = ""

    def level(self, value: float) -> Level:
        """Return the level that begins at or below this value of the signal."""
        return Level((value >= self.shed) + (value >= self.critical))

    def describe(self, value: float) -> str:
        """Return a value of the signal as text, with its unit."""
        return f"{value:.2f} {self.unit}" if self.unit else f"{100 * value:.0f} %"


# The lag of the event loop is in seconds, and counts only if it lasts; the other signals are shares
# of the process's limits. Only connections with a request in progress count, because idle
# connections are closed to make room for new ones.
THRESHOLDS: Mapping[str, Threshold] = {
    "loop_lag": Threshold(0.5, 2.0, "s"),
    "descriptors": Threshold(0.85, 0.95),
    "memory": Threshold(0.85, 0.95),
    "connections": Threshold(0.9, math.inf),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadState:
    """The state of overload as operators see it.

    Attributes:
        reason: the signals that caused the level, with their values; empty at the normal level.
        signals: latest value of each signal.
        num_refused: number of requests refused since the start.
        num_changes: number of changes of the level since the start.
    """

    level: Level
    reason: str
    signals: Mapping[str, float]
    num_refused: int
    num_changes: int


@dataclass(slots=True, eq=False)
class Overload:
    """Tracks one router's level of overload.

    Args:
        on_change: called with each new level.
        thresholds: threshold of each signal, by its name.
        clock: returns seconds.
    """

    on_change: Callable[[Level], None] = lambda level: None
    thresholds: Mapping[str, Threshold] = field(default_factory=lambda: THRESHOLDS)
    clock: Callable[[], float] = time.monotonic
    level: Level = field(default=Level.NORMAL, init=False)
    reason: str = field(default="", init=False)
    _values: dict[str, float] = field(default_factory=dict, init=False)
    _well_since: float | None = field(default=None, init=False)
    _num_refused: int = field(default=0, init=False)
    _num_changes: int = field(default=0, init=False)

    def note(self, values: Mapping[str, float]) -> None:
        """Set new values of some signals, and update the level; other signals keep their values."""
        self._values.update(values)
        level, reason = self._worst(1.0)
        if level >= self.level:
            self._well_since = None
            if level > self.level:
                self._change(level, reason)
            elif level:
                self.reason = reason
            return
        lower, why = self._worst(_WELL_BELOW)
        if lower >= self.level:
            self._well_since = None
            return
        if self._well_since is None:
            self._well_since = self.clock()
        if self.clock() - self._well_since >= HOLD_S:
            self._well_since = None
            self._change(lower, why)

    def check(self) -> None:
        """Raise OverloadedError at the critical level; call it before working on a request."""
        if self.level is Level.CRITICAL:
            self._num_refused += 1
            error = OverloadedError(f"the router is overloaded: {self.reason}")
            error.retry_delay_s = _RETRY_DELAY_S
            raise error

    def state(self) -> OverloadState:
        return OverloadState(
            level=self.level,
            reason=self.reason,
            signals=dict(self._values),
            num_refused=self._num_refused,
            num_changes=self._num_changes,
        )

    def _worst(self, share: float) -> tuple[Level, str]:
        """Return the worst level of all signals, and the signals that cause it.

        Args:
            share: factor of all thresholds.
        """
        levels = {
            name: self.thresholds[name].level(value / share) for name, value in self._values.items()
        }
        worst = max(levels.values(), default=Level.NORMAL)
        names = [name for name, level in levels.items() if level is worst and level]
        return worst, ", ".join(
            f"{name} {self.thresholds[name].describe(self._values[name])}" for name in names
        )

    def _change(self, level: Level, reason: str) -> None:
        before, self.level, self.reason = self.level, level, reason
        self._num_changes += 1
        log = logger.warning if level > before else logger.info
        log(
            "overload: %s -> %s%s",
            before.name.lower(),
            level.name.lower(),
            f" ({reason})" if reason else "",
        )
        self.on_change(level)


class LoopLag:
    """Measures how late the event loop runs its tasks; a single pause does not count.

    Attributes:
        lag_s: the smallest of the latest measured lags.
    """

    INTERVAL_S = 0.1
    CALM_INTERVAL_S = 0.5
    _CALM_LAG_S = 0.02
    _NUM_LOOKS = 3

    def __init__(self) -> None:
        self.lag_s = 0.0
        self._lags = [0.0] * self._NUM_LOOKS

    async def look(self, *, may_be_slow: bool = False) -> None:
        """Sleep for an interval, and measure how much longer than asked for the sleep was.

        Args:
            may_be_slow: whether to sleep for `CALM_INTERVAL_S` while lags are short.
        """
        loop = asyncio.get_running_loop()
        is_calm = may_be_slow and max(self._lags) < self._CALM_LAG_S
        due_at = loop.time() + self.INTERVAL_S
        if is_calm:
            due_at = next_tick(loop.time(), self.CALM_INTERVAL_S)
        await asyncio.sleep(due_at - loop.time())
        self._lags = [*self._lags[1:], max(loop.time() - due_at, 0.0)]
        self.lag_s = min(self._lags)
