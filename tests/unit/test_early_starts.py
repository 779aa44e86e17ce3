"""Unit tests of `Start` messages that reach a decode node before their commands."""

from __future__ import annotations

import pytest

from decode_node import reservations
from decode_node.reservations import MEMORY_S
from kvconnector.base import TransferEvent, TransferEventKind
from tests.property.test_handoff import make_cluster


def started(request_id: str) -> TransferEvent:
    return TransferEvent(
        kind=TransferEventKind.STARTED, engine_id="p", request_id=request_id, epoch=1
    )


def test_a_repeated_start_does_not_keep_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one `Start` that was repeated kept up to 10,000 others for ever."""
    cluster = make_cluster(20)
    table = cluster.d.reservations
    table.settle(started("repeated"))
    table.settle(started("once"))
    for _ in range(3):
        cluster.clock.advance(MEMORY_S / 2)
        table.settle(started("repeated"))
        table.tick()
    assert list(table._early_starts) == [(("repeated", 1), "p")]
    monkeypatch.setattr(reservations, "MAX_EARLY_STARTS", 2)
    for name in ("a", "repeated", "b"):
        table.settle(started(name))
    names = [request_id for (request_id, _), _ in table._early_starts]
    assert names == ["repeated", "b"]  # the newest two
