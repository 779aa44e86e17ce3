"""Unit tests of RoundWatch: which thread stands in one round, counted in beats."""

from __future__ import annotations

from baton.link.round_watch import Rounds, RoundWatch
from baton.link.words import BEAT_INTERVAL_S, NodeBeat


def test_a_thread_that_ends_no_round_is_told_with_how_long_it_has_not() -> None:
    rounds = {"engine": Rounds(0, False), "kv-io": Rounds(0, True)}
    watch = RoundWatch(lambda: rounds.copy())
    for number in range(8):
        rounds["kv-io"] = Rounds(number, True)
        watch.tick()
        assert watch.stalled_s == 0  # one sleeps, the other gets on
    rounds["engine"] = Rounds(1, True)
    for _ in range(5):
        rounds["kv-io"] = Rounds(rounds["kv-io"].num_ended + 1, True)
        watch.tick()
    assert (watch.stalled_thread, watch.stalled_s) == ("engine", 4 * BEAT_INTERVAL_S)
    assert watch.mark(NodeBeat(num_running=3)) == NodeBeat(
        num_running=3, num_rounds=13, stalled_s=1.0, stalled_thread="engine", longest_round_s=0
    )
    rounds = {"engine": Rounds(2, True), "kv-io": Rounds(13, False)}
    watch.tick()
    beat = watch.mark(NodeBeat())
    assert (beat.stalled_s, beat.stalled_thread, beat.longest_round_s) == (0, "", 1.0)
