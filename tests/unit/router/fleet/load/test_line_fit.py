"""Unit tests of LineFit: the right line, bounds, and what is known before anything is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.load.line_fit import LineFit

GUESS = ((0.0, 0.01), (1000.0, 0.11))


def test_a_line_is_found_again() -> None:
    line = LineFit(0.99)
    for units in (100, 900, 300, 500, 200) * 10:
        line.measure(units, 0.02 + 0.001 * units)
    line.refresh()
    assert line.base == pytest.approx(0.02)
    assert line.per_unit == pytest.approx(0.001)
    assert line.num_measured == 50


def test_before_anything_is_measured_the_guess_holds_and_then_it_fades() -> None:
    shared = LineFit(0.9, guess=GUESS)
    line = LineFit(0.9, shared=shared)
    assert line.base == pytest.approx(0.01)
    assert line.per_unit == pytest.approx(0.0001)
    for units in (100, 1000) * 100:
        line.measure(units, 0.01 * units)
    line.refresh()
    assert line.per_unit == pytest.approx(0.01, rel=0.01)


def test_a_new_node_begins_with_what_others_measured_and_a_slow_one_is_told_apart() -> None:
    shared = LineFit(0.98, guess=GUESS)
    fast, slow = LineFit(0.95, shared=shared), LineFit(0.95, shared=shared)
    for units in (200, 1000) * 50:
        fast.measure(units, 0.001 * units)
        slow.measure(units, 0.003 * units)
    fast.refresh()
    slow.refresh()
    assert slow.per_unit > 2 * fast.per_unit
    new = LineFit(0.95, shared=shared)
    assert fast.per_unit < new.per_unit < slow.per_unit
    assert new.num_measured == 0


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100)), max_size=20))
def test_neither_base_nor_slope_is_ever_below_0(points: list[tuple[float, float]]) -> None:
    line = LineFit(0.9, shared=LineFit(0.9, guess=GUESS))
    for units, seconds in points:
        line.measure(units, seconds)
    line.refresh()
    assert line.base >= 0
    assert line.per_unit >= 0
