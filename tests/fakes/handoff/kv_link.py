"""A real sender and receiver with their memories, and methods with which tests drive them.

Refuses to know: which connector is between them, what is asserted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from baton.testing.transports import BLOCK_SIZE, NUM_BLOCKS, Pair
from kvconnector import KV_CONNECTORS
from kvconnector.base import TransferEvent, TransferEventKind
from tests.fakes.time.waiting import wait_until

NUM_P_BLOCKS, NUM_D_BLOCKS = 12, NUM_BLOCKS
numbers = itertools.count()  # an engine id is never used twice

Kind = TransferEventKind
CONNECTORS = [
    pytest.param(name, marks=[pytest.mark.nixl] if name.startswith("nixl") else [])
    for name in KV_CONNECTORS.names()
]


@dataclass
class Link(Pair):
    """The shipped suite's pair, with several attempts of a request and several events of a kind."""

    def poll(self) -> None:
        self.sent += self.sender.poll()
        self.received += self.receiver.poll()

    @property
    def p(self) -> str:
        return self.sender.peer_info.engine_id

    @property
    def d(self) -> str:
        return self.receiver.peer_info.engine_id

    def events(self, side: str, kind: Kind, request_id: str = "") -> list[TransferEvent]:
        found = self.sent if side == "p" else self.received
        return [e for e in found if e.kind is kind and request_id in ("", e.request_id)]

    def wait(self, side: str, kind: Kind, request_id: str = "", count: int = 1) -> TransferEvent:
        """Wait for the ``count``-th event of a kind; return it."""

        def came() -> bool:
            self.poll()
            return len(self.events(side, kind, request_id)) >= count

        wait_until(came, f"{kind} {count} of {request_id!r} at {side}")
        return self.events(side, kind, request_id)[count - 1]

    def start(self, request_id: str, num_tokens: int, epoch: int = 0) -> None:
        """Announce a transfer, without waiting."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.sender.start(request_id, epoch, self.d, num_tokens=num_tokens, num_blocks=num_blocks)
