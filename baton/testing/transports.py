"""Contract of KV transports: sent blocks arrive in the right blocks of the peer, and only there.

A sender and a receiver, each with its own memory and an I/O thread, transfer blocks over the
transport. Every wait ends after `TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from baton.kv.manifest import KVArray, KVGroup, KVKind, KVManifest
from kvconnector.base import (
    BlockPush,
    HandoffRecord,
    KVReservation,
    TransferEvent,
    TransferEventKind,
)
from kvconnector.blocks import LayerRange
from kvconnector.ends import Receiver, Sender
from kvconnector.transports.base import MakeTransport

BLOCK_SHAPE = (2, 2, 2, 4, 8)  # layers, k and v, heads, tokens, head_dim
BLOCK_SIZE = BLOCK_SHAPE[3]
NUM_BLOCKS = 16
UNTOUCHED = -1.0
TIMEOUT_S = 20.0
_numbers = itertools.count()  # for engine ids, none of which is used twice


@dataclass(frozen=True)
class PlainMemory:
    """KV memory without an engine; implements `kvconnector.layout.KVMemory`."""

    tensor: torch.Tensor
    manifest: KVManifest
    rank: int = 0


def memory_of(tensor: torch.Tensor) -> PlainMemory:
    """Return a KV memory over a tensor of blocks, `[num_blocks, num_layers, ...]`, for one rank."""
    return PlainMemory(tensor, manifest(*tensor.shape[1:], dtype=tensor.dtype))


def manifest(*shape: int, dtype: torch.dtype = torch.float32) -> KVManifest:
    """Return the manifest of blocks of `BLOCK_SHAPE`, in layer-major order."""
    group = KVGroup(
        kind=KVKind.PAGED,
        layers=tuple(range(shape[0])),
        arrays=(KVArray(shape=shape[1:], dtype=str(dtype).removeprefix("torch.")),),
        num_places=shape[0],
        block_size=shape[-2],
    )
    return KVManifest(groups=(group,))


@dataclass
class Pair:
    """A connected sender and receiver, with their memories and all their events so far."""

    sender: Sender
    receiver: Receiver
    source: torch.Tensor
    target: torch.Tensor
    sent: list[TransferEvent] = field(default_factory=list)
    received: list[TransferEvent] = field(default_factory=list)

    def wait(self, side: str, kind: TransferEventKind, request_id: str = "") -> TransferEvent:
        """Wait for a request's event at the sender ("p") or at the receiver ("d"); return it."""
        give_up_at = time.monotonic() + TIMEOUT_S
        while True:
            self.sent += self.sender.poll()
            self.received += self.receiver.poll()
            for event in self.sent if side == "p" else self.received:
                if event.kind is kind and request_id in ("", event.request_id):
                    return event
            assert time.monotonic() < give_up_at, f"no {kind} of {request_id!r} at {side}"
            time.sleep(0.001)

    def start(self, request_id: str, num_tokens: int) -> None:
        """Announce a transfer at the sender, and wait until the receiver has been told."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        peer = self.receiver.peer_info.engine_id
        self.sender.start(request_id, 0, peer, num_tokens=num_tokens, num_blocks=num_blocks)
        self.wait("d", TransferEventKind.STARTED, request_id)

    def grant(
        self, request_id: str, block_ids: tuple[int, ...], epoch: int = 0, first_block: int = 0
    ) -> None:
        """Grant blocks of the receiver to a transfer."""
        engine_id = self.sender.peer_info.engine_id
        self.receiver.grant(
            KVReservation(
                request_id=request_id, epoch=epoch, engine_id=engine_id, block_ids=block_ids,
                first_block=first_block,
            )
        )  # fmt: skip

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
        """Push blocks, or some layers of them, from the sender.

        Args:
            token_id: token 1, given with the last blocks of the transfer.
            is_computed: returns whether the blocks have been computed; None: they have.
        """
        record = None
        if token_id is not None:
            record = HandoffRecord(num_tokens=num_tokens, token_id=token_id)
        self.sender.push(
            BlockPush(
                request_id=request_id, epoch=epoch, first_block=first_block, block_ids=block_ids,
                num_tokens=num_tokens, record=record, layers=layers, is_computed=is_computed,
            )
        )  # fmt: skip

    def assert_arrived(self, moves: dict[int, int]) -> None:
        """Assert that source blocks arrived in target blocks, and that no other block changed."""
        for source_id, target_id in moves.items():
            assert torch.equal(self.target[target_id], self.source[source_id])
        for block_id in set(range(NUM_BLOCKS)) - set(moves.values()):
            assert (self.target[block_id] == UNTOUCHED).all(), f"block {block_id} was written"


@contextlib.contextmanager
def connected(make_transport: MakeTransport) -> Iterator[Pair]:
    """Connect a sender and a receiver over a transport; at the end, check that no thread died."""
    number, deaths = next(_numbers), list[Exception]()
    wake: Callable[[], None] = lambda: None  # noqa: E731
    source = torch.rand(NUM_BLOCKS, *BLOCK_SHAPE)
    target = torch.full((NUM_BLOCKS, *BLOCK_SHAPE), UNTOUCHED)
    receiver = Receiver(make_transport(f"d{number}-suite", memory_of(target)), wake, deaths.append)
    sender = Sender(make_transport(f"p{number}-suite", memory_of(source)), wake, deaths.append)
    pair = Pair(sender, receiver, source, target)
    try:
        sender.loop.start()
        receiver.loop.start()
        receiver.expect(True)
        receiver.connect(sender.peer_info)
        sender.connect(receiver.peer_info)
        pair.wait("p", TransferEventKind.PEER_CONNECTED)
        pair.wait("d", TransferEventKind.PEER_CONNECTED)
        yield pair
    finally:
        sender.close()
        receiver.close()
    assert deaths == []


class TransportContract:
    """Tests of a transport."""

    def make(self) -> MakeTransport:
        """Return the entry to register: a function that makes a transport."""
        raise NotImplementedError

    def test_a_self_test_writes_no_kv(self) -> None:
        with connected(self.make()) as pair:
            pair.assert_arrived({})

    def test_blocks_arrive_where_they_were_granted_and_nowhere_else(self) -> None:
        with connected(self.make()) as pair:
            pair.start("a", 10)
            pair.grant("a", (9, 3, 15))
            pair.push("a", 0, (4, 0, 11), 10, token_id=77)
            committed = pair.wait("d", TransferEventKind.COMMITTED)
            assert committed.record == HandoffRecord(num_tokens=10, token_id=77)
            pair.assert_arrived({4: 9, 0: 3, 11: 15})  # all blocks arrive before the commit record
            pair.wait("p", TransferEventKind.COMMITTED)

    def test_bytes_are_there_when_a_watermark_tells_of_them(self) -> None:
        with connected(self.make()) as pair:
            pair.start("a", 8)
            pair.grant("a", (5, 6))
            pair.push("a", 0, (1,), 4)
            assert pair.wait("d", TransferEventKind.WATERMARK).num_tokens == 4
            pair.assert_arrived({1: 5})
            pair.push("a", 1, (2,), 8, token_id=1)
            pair.wait("d", TransferEventKind.COMMITTED)
            pair.assert_arrived({1: 5, 2: 6})

    def test_transfers_side_by_side_do_not_mix(self) -> None:
        with connected(self.make()) as pair:
            for number in range(8):
                pair.start(f"r{number}", 4)
            for number in range(8):
                pair.grant(f"r{number}", (15 - number,))
                pair.push(f"r{number}", 0, (number,), 4, token_id=number)
            for number in range(8):
                committed = pair.wait("d", TransferEventKind.COMMITTED, f"r{number}")
                assert committed.record == HandoffRecord(num_tokens=4, token_id=number)
            pair.assert_arrived({number: 15 - number for number in range(8)})
