"""Unit tests of how a node drains."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.link.drain import Drain
from baton.link.words import NodeBeat, ServingState

QUIET = NodeBeat(num_free_blocks=7)


def test_a_serving_node_is_never_drained_however_quiet() -> None:
    drain = Drain()
    assert drain.mark(QUIET, all_routers_know=True) == QUIET
    assert not drain.drained.is_set()


@pytest.mark.parametrize(
    "left",
    [
        "num_waiting",
        "num_waiting_for_remote_kvs",
        "num_running",
        "num_transfers",
        "num_quarantined_blocks",
    ],
)
def test_whatever_is_left_keeps_a_node_from_being_drained(left: str) -> None:
    drain = Drain()
    drain.begin()
    counts: dict[str, Any] = {left: 1}
    beat = drain.mark(dataclasses.replace(QUIET, **counts), all_routers_know=True)
    assert beat.serving_state is ServingState.DRAINING
    assert getattr(beat, left) == 1
    assert drain.mark(QUIET, all_routers_know=True).serving_state is ServingState.DRAINED
    assert drain.drained.is_set()


def test_a_router_that_does_not_know_may_still_place_something() -> None:
    drain = Drain()
    drain.begin()
    assert drain.mark(QUIET, all_routers_know=False).serving_state is ServingState.DRAINING
    assert not drain.drained.is_set()


def test_a_drained_node_that_gets_something_is_drained_no_more() -> None:
    drain = Drain()
    drain.begin()
    drain.mark(QUIET, all_routers_know=True)
    drain.begin()
    assert drain.state is ServingState.DRAINED  # being told twice changes nothing
    assert drain.mark(QUIET, all_routers_know=False).serving_state is ServingState.DRAINING
    assert not drain.drained.is_set()


def test_it_serves_again_when_told_to() -> None:
    drain = Drain()
    drain.begin()
    drain.mark(QUIET, all_routers_know=True)
    drain.resume()
    assert drain.mark(QUIET, all_routers_know=True).serving_state is ServingState.SERVING
    assert not drain.drained.is_set()
