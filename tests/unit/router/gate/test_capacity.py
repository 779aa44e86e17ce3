"""Unit tests of Capacity: the estimated end of given work, even if a node reports wrong numbers."""

from __future__ import annotations

import pytest

from baton.link.words import NodeBeat
from router.gate.capacity import Capacity
from tests.fakes.router.fleets import FleetBook

PROMPT = 1000


def test_a_node_that_says_it_is_busy_for_ever_is_not_what_others_are_measured_by() -> None:
    book = FleetBook(2, 1)
    fleet = book.fleet()
    for node in book.prefills:
        for size in (1, 2) * 50:  # a token takes a millisecond
            node.prefill.measure(size * PROMPT, size * 1.0)
        node.prefill.refresh()
    capacity = Capacity(lambda: fleet)
    liar, other = book.prefills
    for node in (liar, other):
        node.note_beat(NodeBeat(num_uncomputed_tokens=3 * PROMPT))
    assert capacity.wait_s(2, 2 * PROMPT, 0) == pytest.approx(4.0, rel=0.05)  # both share it
    liar.note_beat(NodeBeat(num_uncomputed_tokens=2**32 - 1))
    assert capacity.wait_s(2, 2 * PROMPT, 0) == pytest.approx(5.0, rel=0.05)
