"""A real sender and receiver with their memories, and what a test does with them.

Refuses to know: which connector is between them, what is asserted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from kvconnector import KV_CONNECTORS
from kvconnector.base import (
    BlockPush,
    HandoffRecord,
    KVReservation,
    TransferEvent,
    TransferEventKind,
)
from kvconnector.blocks import LayerRange
from kvconnector.ends import Receiver, Sender
from tests.fakes.time.waiting import wait_until

BLOCK_SHAPE = (2, 2, 2, 4, 8)  # layers, k and v, heads, tokens, head_dim
BLOCK_SIZE = BLOCK_SHAPE[3]
NUM_P_BLOCKS, NUM_D_BLOCKS = 12, 16
UNTOUCHED = -1.0
numbers = itertools.count()  # an engine id is never used twice

Kind = TransferEventKind
CONNECTORS = [
    pytest.param(name, marks=[pytest.mark.nixl] if name.startswith("nixl") else [])
    for name in KV_CONNECTORS.names()
]


@dataclass
class Link:
    """A connected sender and receiver, their memories, and all events so far."""

    sender: Sender
    receiver: Receiver
    source: torch.Tensor
    target: torch.Tensor
    sent: list[TransferEvent] = field(default_factory=list)
    received: list[TransferEvent] = field(default_factory=list)

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
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.sender.start(request_id, epoch, self.d, num_tokens=num_tokens, num_blocks=num_blocks)

    def grant(
        self, request_id: str, block_ids: tuple[int, ...], epoch: int = 0, first_block: int = 0
    ) -> None:
        self.receiver.grant(
            KVReservation(
                request_id=request_id,
                epoch=epoch,
                engine_id=self.p,
                block_ids=block_ids,
                first_block=first_block,
            )
        )

    def push(
        self,
        request_id: str,
        first_block: int,
        block_ids: tuple[int, ...],
        num_tokens: int,
        token_id: int | None = None,
        epoch: int = 0,
        layers: LayerRange | None = None,
        is_computed: Callable[[], bool] | None = None,
    ) -> None:
        self.sender.push(
            BlockPush(
                request_id=request_id,
                epoch=epoch,
                first_block=first_block,
                block_ids=block_ids,
                num_tokens=num_tokens,
                record=None
                if token_id is None
                else HandoffRecord(num_tokens=num_tokens, token_id=token_id),
                layers=layers,
                is_computed=is_computed,
            )
        )

    def assert_arrived(self, moves: dict[int, int]) -> None:
        """Assert that source blocks arrived in target blocks, and that no other block changed."""
        for source_id, target_id in moves.items():
            assert torch.equal(self.target[target_id], self.source[source_id])
        for block_id in set(range(NUM_D_BLOCKS)) - set(moves.values()):
            assert (self.target[block_id] == UNTOUCHED).all(), f"block {block_id} was written"
