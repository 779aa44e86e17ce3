"""Unit tests of Transfer: how pushes are cut, and which blocks are written again."""

from __future__ import annotations

import pytest

from kvconnector.base import BlockPush
from kvconnector.blocks import LayerRange
from kvconnector.protocol.transfer import MAX_ATTEMPTS, Piece, QueuedPush, Transfer

NUM_LAYERS = 32
NUM_BLOCKS = 8
BLOCKS = range(NUM_BLOCKS)
Ranges = list[LayerRange]


def posted(ranges: Ranges) -> Transfer:
    """Return a transfer that has posted its blocks in these ranges of layers."""
    transfer = Transfer("r", 0, "d", NUM_BLOCKS)
    for layers in ranges:
        piece = Piece(tuple(BLOCKS), tuple(BLOCKS), layers)
        transfer.note_post(piece, BLOCKS, 1, 0.0, num_layers=NUM_LAYERS)
    return transfer


def all_ranges() -> Ranges:
    return [(first, end) for end in range(1, NUM_LAYERS + 1) for first in range(end)]


@pytest.mark.parametrize("ranges", [[(0, NUM_LAYERS)], [(0, 8), (8, 32)]])
def test_requests_for_ever_new_ranges_of_layers_fail_a_transfer(ranges: Ranges) -> None:
    """Regression: each new range was written again, so a peer's requests never ended."""
    transfer = posted(ranges)
    for layers in all_ranges():
        transfer.send_again(list(BLOCKS), layers, 1)
    assert transfer.failure is not None
    assert "too many ranges of layers" in transfer.failure
    assert not transfer.pushes
    assert len(transfer.attempts) <= (2 * len(ranges) + 1) * NUM_BLOCKS


def test_posted_ranges_and_a_range_that_joins_them_are_written_again() -> None:
    """A decode node that heard no digests requests all layers of a block as one range."""
    ranges = [(0, 8), (8, 16), (16, 32)]
    transfer = posted(ranges)
    for layers in [*ranges, (0, 16), (0, NUM_LAYERS)]:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            transfer.send_again(list(BLOCKS), layers, attempt)
    assert transfer.failure is None
    assert len(transfer.pushes) == 5 * MAX_ATTEMPTS


def test_a_block_that_a_request_names_twice_is_written_once() -> None:
    transfer = posted([(0, NUM_LAYERS)])
    transfer.send_again([1, 1, 0, 1], (0, NUM_LAYERS), 1)
    transfer.send_again([0, 1], (0, NUM_LAYERS), 1)  # repeated: nothing new
    assert [push.whole.indices for push in transfer.pushes] == [(1, 0)]


def test_a_push_is_cut_in_order_of_block_ids_and_only_its_last_piece_has_the_watermark() -> None:
    push = BlockPush(
        request_id="r", epoch=0, first_block=2, block_ids=(7, 3, 5, 4, 9), num_tokens=112
    )
    queued, pieces = QueuedPush.of(push), []
    for max_blocks in (1, 3, 8):
        assert not queued.is_posted
        pieces.append(queued.next_piece(max_blocks))
    assert queued.is_posted
    assert [piece.block_ids for piece in pieces] == [(3,), (4, 5, 7), (9,)]
    assert [piece.indices for piece in pieces] == [(3,), (5, 4, 2), (6,)]
    assert [piece.watermark for piece in pieces] == [None, None, (112, 7)]
