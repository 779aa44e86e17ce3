"""Unit tests of Switch: how long a direction stays off."""

from __future__ import annotations

from engine.kv_files.switch import FIRST_PAUSE_S, Switch


def test_failures_of_one_moment_cause_one_pause() -> None:
    now = 0.0
    switch = Switch("reading", lambda: now)
    for _ in range(6):  # reads that stood still together
        switch.fail("a read was late")
    assert not switch.is_on
    now = FIRST_PAUSE_S
    assert switch.is_on
    switch.fail("a read was late")
    now += 2 * FIRST_PAUSE_S - 1
    assert not switch.is_on
    now += 1
    assert switch.is_on
