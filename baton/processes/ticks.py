"""Ticks: multiples of an interval on the monotonic clock, which the processes of a machine share.

Tasks that wake at ticks wake together, so that an idle machine sleeps.
"""

from __future__ import annotations

# Shortest pause until a tick, as a share of the interval. A timer that fires a little early then
# does not fire twice for one tick.
SOON = 0.1


def next_tick(now: float, interval_s: float, least: float = 0.5) -> float:
    """Return the first multiple of ``interval_s`` that is at least ``least`` intervals after now.

    Intervals that are multiples of each other share ticks.
    """
    return (int(now / interval_s + least) + 1) * interval_s
