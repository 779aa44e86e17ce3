"""BeatWatch: counts the beats that nodes miss, answers beats, and says how often to beat at rest.

A beat with its answer costs the router about 0.16 ms, so the nodes of a large fleet beat less often
while they rest. A node with requests always beats in every interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.link.beat_pace import INTERVALS_AT_REST, more_patience, read_intervals_at_rest
from baton.link.words import RouterBeat, RouterCommand

# The router answers every second beat of a busy node, and every beat of a node at rest. An answer
# costs less than a beat at any other time, because both processes are awake.
ANSWER_INTERVAL_S = (INTERVALS_AT_REST - 0.5) * BEAT_INTERVAL_S
# Beats per second that all nodes of a router may send at rest. More than 1,000 nodes send more,
# because each node beats at least once in `MAX_INTERVALS_AT_REST` intervals.
BEATS_AT_REST_PER_S = 1000.0


class BeatingNode(Protocol):
    """The attributes of a `Node` that BeatWatch reads and writes."""

    num_missed_beats: int
    answered_at: float
    intervals_at_rest: int

    @property
    def send(self) -> Callable[[RouterCommand], None]:
        """Function that sends a command over the node's link."""

    @property
    def rests(self) -> bool:
        """Whether the node has nothing to do, so that it beats less often."""


class BeatWatch:
    """The beats of one pool's nodes.

    Args:
        max_missed: a node that misses more beats than this in a row is lost.
        clock: returns monotonic seconds.

    Attributes:
        num_expected: number of the router's nodes that have joined or will probably join soon.
    """

    def __init__(self, max_missed: int, clock: Callable[[], float]) -> None:
        self.max_missed = max_missed
        self.num_expected = 0
        self._clock = clock

    @property
    def intervals_at_rest(self) -> int:
        """Beat intervals from one beat of a node at rest to its next, for a fleet of this size."""
        intervals_per_s = 1 / BEAT_INTERVAL_S
        return read_intervals_at_rest(
            math.ceil(self.num_expected * intervals_per_s / BEATS_AT_REST_PER_S)
        )

    def note_joined(self, node: BeatingNode) -> None:
        """Set how often a node that joins is told to beat at rest."""
        node.intervals_at_rest = self.intervals_at_rest

    def answer(self, node: BeatingNode) -> None:
        """Send a node a beat, unless the router has just sent one."""
        if (now := self._clock()) - node.answered_at >= ANSWER_INTERVAL_S:
            self._send(node, now)

    def note_intervals(self, node: BeatingNode, num_intervals: int) -> bool:
        """Count intervals without a message of a node; return whether the node is lost.

        Sends the node a beat if the last one was long ago: in a storm of joins, beats of nodes come
        late, so the router has nothing to answer, and nodes must not take the router for dead.
        """
        now = self._clock()
        if now - node.answered_at >= (node.intervals_at_rest + 0.5) * BEAT_INTERVAL_S:
            self._send(node, now)
        node.num_missed_beats += num_intervals
        # The first missed beat is not counted, because the node's beat may be on its way. A node at
        # rest is lost after three times its longer interval, if `max_missed` is the default of 4.
        not_counted = 2 + more_patience(node.intervals_at_rest) if node.rests else 1
        return node.num_missed_beats > self.max_missed + not_counted

    def _send(self, node: BeatingNode, now: float) -> None:
        node.answered_at, node.intervals_at_rest = now, self.intervals_at_rest
        node.send(RouterBeat(node.intervals_at_rest))
