"""RoundWatch: finds threads of a node that are stuck in one round of work.

If a node's engine hangs, its process still sends beats from other threads. Rounds are measured in
beats, not in seconds, so a pause of the whole process does not make its threads look stuck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.link.words import BEAT_INTERVAL_S, NodeBeat


class Rounds(NamedTuple):
    """Number of rounds that a thread has ended, and whether it is within one now."""

    num_ended: int
    in_round: bool


class RoundWatch:
    """Find threads of one node that are stuck in one round.

    Args:
        rounds: returns the threads' rounds by name; safe from any thread.

    Attributes:
        stalled_s: how long the most stalled thread has been in its round.
        stalled_thread: its name; empty if none is stalled.
    """

    def __init__(self, rounds: Callable[[], Mapping[str, Rounds]]) -> None:
        self.stalled_s = 0.0
        self.stalled_thread = ""
        self._rounds = rounds
        self._last: Mapping[str, Rounds] = {}
        self._num_beats: dict[str, int] = {}  # beats since a thread's round began
        self._longest = 0

    def tick(self) -> None:
        """Compare each thread's round with that of the last beat; call once per beat."""
        rounds = self._rounds()
        for name, now in rounds.items():
            if now.in_round and now == self._last.get(name):
                self._num_beats[name] = self._num_beats.get(name, 0) + 1
            else:
                self._longest = max(self._longest, self._num_beats.pop(name, 0))
        self._last = rounds
        self.stalled_thread = max(self._num_beats, key=self._num_beats.__getitem__, default="")
        self.stalled_s = self._num_beats.get(self.stalled_thread, 0) * BEAT_INTERVAL_S

    def mark(self, beat: NodeBeat) -> NodeBeat:
        """Return the beat with the numbers of rounds and the stalled thread."""
        return dataclasses.replace(
            beat,
            num_rounds=sum(rounds.num_ended for rounds in self._last.values()),
            stalled_s=self.stalled_s,
            stalled_thread=self.stalled_thread,
            longest_round_s=self._longest * BEAT_INTERVAL_S,
        )
