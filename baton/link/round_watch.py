"""RoundWatch: for how long a node's threads have stood in one round of their work.

A process whose engine hangs still beats, as other threads of it live. Counted in beats, not in
seconds: a process that was stopped as a whole blames none of its threads when it goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.link.words import BEAT_INTERVAL_S, NodeBeat


class Rounds(NamedTuple):
    """The rounds of one thread: how many have ended, and whether it is in one now, not asleep."""

    num_ended: int
    in_round: bool


class RoundWatch:
    """Finds threads of one node that are stuck in one round.

    Args:
        rounds: of its threads, by their names; safe from any thread.

    Attributes:
        stalled_s: of the thread that has been in one round for longest.
        stalled_thread: its name; empty: none is.
    """

    def __init__(self, rounds: Callable[[], Mapping[str, Rounds]]) -> None:
        self.stalled_s = 0.0
        self.stalled_thread = ""
        self._rounds = rounds
        self._last: Mapping[str, Rounds] = {}
        self._num_beats: dict[str, int] = {}  # since a thread's round began
        self._longest = 0

    def tick(self) -> None:
        """Compare each thread's round with the last one; to be called once per beat."""
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
        """Return the beat with the threads' rounds and a stalled thread in it."""
        return dataclasses.replace(
            beat,
            num_rounds=sum(rounds.num_ended for rounds in self._last.values()),
            stalled_s=self.stalled_s,
            stalled_thread=self.stalled_thread,
            longest_round_s=self._longest * BEAT_INTERVAL_S,
        )
