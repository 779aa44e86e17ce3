"""Unit tests of RanksTransport: what a call that failed leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

import msgspec
import pytest
import torch

from baton.api.errors import TransferError
from baton.testing.transports import PlainMemory, manifest
from kvconnector.ranks import transport as ranks_transport
from kvconnector.ranks.service import RankService
from kvconnector.ranks.transport import RanksTransport
from kvconnector.transports.in_memory import InMemoryTransport

BLOCKS = (4, 2, 2, 4, 8)  # layers, k and v, heads, tokens, head_dim


class Node:
    """A node of two ranks; the other rank's service runs when a test calls `serve`."""

    def __init__(self) -> None:
        one = manifest(*BLOCKS)
        (group,) = one.groups
        heads = msgspec.structs.replace(group.arrays[0], shard_axis=1)
        both = msgspec.structs.replace(
            one, groups=(msgspec.structs.replace(group, arrays=(heads,)),), num_ranks=2
        )
        memories = [PlainMemory(torch.zeros(3, 4, 2, 1, 4, 8), both, rank) for rank in range(2)]
        link, theirs = Pipe()
        self._local = InMemoryTransport("ranks", memories[0])
        self._other = InMemoryTransport("ranks", memories[1])
        self._service = RankService(theirs, memories[1], self._other)
        self.transport = RanksTransport(self._local, {1: link})

    def serve(self) -> None:
        """Let the other rank answer, and let the leading process read the answers."""
        self._service.round()
        self.transport.take_notifications()

    def kept_answers(self) -> dict[int, Any]:
        return self.transport._others[0]._answers

    def close(self) -> None:
        self.transport.close()
        self._other.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


def test_answers_to_calls_that_failed_here_are_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each call that failed on the leading rank kept the other ranks' answers."""

    def fail(slot: int, engine_id: str) -> None:
        del slot, engine_id
        raise TransferError("the device is gone")

    monkeypatch.setattr(node._local.scratch, "lend", fail)
    for _ in range(3):
        with pytest.raises(TransferError, match="the device is gone"):
            node.transport.scratch.lend(0, "p")
        node.serve()
    assert not node.kept_answers()


def test_an_answer_after_the_time_limit_is_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_transport, "CALL_TIMEOUT_S", 0.0)
    with pytest.raises(TransferError, match="rank 1 does not answer"):
        node.transport.scratch.lend(0, "p")
    node.serve()
    assert not node.kept_answers()
