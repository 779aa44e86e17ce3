"""RoundWatch: finds threads of a node that are stuck in one round of work.

If a node's engine hangs, other threads of the node's process still send beats. The duration of a
round is measured in beats, not in seconds, so a pause of the whole process does not make its
threads look stuck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

_of_thread = threading.local()


class Rounds(NamedTuple):
    """How far a thread has come.

    Attributes:
        num_ended: number of ended rounds, plus signs of progress within rounds.
        in_round: whether the thread is in a round now.
    """

    num_ended: int
    in_round: bool


class Progress:
    """Counter of a thread's signs of progress within its rounds.

    Attributes:
        num_signs: the count; may be read on any thread.
    """

    def __init__(self) -> None:
        self.num_signs = 0

    def count_this_thread(self) -> None:
        """Count the signs of progress of the current thread from now on."""
        _of_thread.progress = self


def note_progress() -> None:
    """Give a sign that the current thread is not stuck, although its round may be long."""
    progress: Progress | None = getattr(_of_thread, "progress", None)
    if progress is not None:
        progress.num_signs += 1


class RoundWatch:
    """Finder of the threads of a node that are stuck in one round.

    Args:
        rounds: returns the `Rounds` of each thread, by the thread's name; may be called on any
            thread.
        beat_interval_s: seconds from one beat to the next.

    Attributes:
        stalled_s: seconds for which the thread that is stuck longest has been in its round.
        stalled_thread: name of this thread; empty if no thread is stuck.
    """

    def __init__(self, rounds: Callable[[], Mapping[str, Rounds]], beat_interval_s: float) -> None:
        self.stalled_s = 0.0
        self.stalled_thread = ""
        self._rounds = rounds
        self._beat_interval_s = beat_interval_s
        self._last: Mapping[str, Rounds] = {}
        self._num_beats: dict[str, int] = {}  # thread -> beats since its round began
        self._longest = 0

    def tick(self, num_intervals: int = 1) -> None:
        """Compare each thread's round with its round at the last beat; call once per beat.

        Args:
            num_intervals: beat intervals since the last call.
        """
        rounds = self._rounds()
        for name, now in rounds.items():
            if now.in_round and now == self._last.get(name):
                self._num_beats[name] = self._num_beats.get(name, 0) + num_intervals
            else:
                self._longest = max(self._longest, self._num_beats.pop(name, 0))
        self._last = rounds
        self.stalled_thread = max(self._num_beats, key=self._num_beats.__getitem__, default="")
        self.stalled_s = self._num_beats.get(self.stalled_thread, 0) * self._beat_interval_s

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds that all threads together had ended at the last beat."""
        return sum(rounds.num_ended for rounds in self._last.values())

    @property
    def longest_round_s(self) -> float:
        """Return the duration of the longest ended round."""
        return self._longest * self._beat_interval_s
