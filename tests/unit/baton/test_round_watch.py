"""Unit tests of RoundWatch: the thread that stays in one round, counted in beats."""

from __future__ import annotations

from baton.telemetry.round_watch import Rounds, RoundWatch


def test_a_beat_after_two_intervals_counts_twice() -> None:
    watch = RoundWatch(lambda: {"engine": Rounds(1, True)}, 0.25)
    watch.tick()
    watch.tick(2)
    assert watch.stalled_s == 0.5


def test_a_thread_that_ends_no_round_is_told_with_how_long_it_has_not() -> None:
    rounds = {"engine": Rounds(0, False), "kv-io": Rounds(0, True)}
    watch = RoundWatch(lambda: rounds.copy(), 0.25)
    for number in range(8):
        rounds["kv-io"] = Rounds(number, True)
        watch.tick()
        assert watch.stalled_s == 0  # one sleeps, the other gets on
    rounds["engine"] = Rounds(1, True)
    for _ in range(5):
        rounds["kv-io"] = Rounds(rounds["kv-io"].num_ended + 1, True)
        watch.tick()
    assert (watch.stalled_thread, watch.stalled_s) == ("engine", 1.0)
    assert (watch.num_rounds, watch.longest_round_s) == (13, 0)
    rounds = {"engine": Rounds(2, True), "kv-io": Rounds(13, False)}
    watch.tick()
    assert (watch.stalled_s, watch.stalled_thread, watch.longest_round_s) == (0, "", 1.0)
