"""Contract of KV connectors for partial pushes: single layers, and blocks that the peer lacks."""

from __future__ import annotations

import pytest
import torch

from baton.testing.transports import UNTOUCHED
from kvconnector.blocks import LayerRange
from tests.fakes.handoff.kv_link import Kind, Link
from tests.fakes.time.waiting import wait_until

pytestmark = pytest.mark.medium


def test_layers_arrive_by_themselves_and_the_others_stay_as_they_were(link: Link) -> None:
    link.start("a", 12)
    link.wait("d", Kind.STARTED)
    link.grant("a", (5, 6, 7))
    link.push("a", 0, (1, 2, 3), 0, layers=(1, 2))  # neighbours, whose layers do not adjoin
    moved = torch.full_like(link.target, UNTOUCHED)
    moved[5:8, 1] = link.source[1:4, 1]
    wait_until(lambda: torch.equal(link.target, moved), "layer 1 to arrive")
    assert not link.events("d", Kind.WATERMARK)
    link.push("a", 0, (1, 2, 3), 0, layers=(0, 1))
    link.push("a", 3, (), 12, token_id=1)
    receipt = link.wait("d", Kind.COMMITTED).receipt
    link.assert_arrived({1: 5, 2: 6, 3: 7})
    assert receipt is not None
    assert (receipt.num_blocks, receipt.num_bytes) == (3, 3 * link.source[0].nbytes)
    assert receipt.num_descriptors == 6


def test_what_a_gpu_still_computes_is_not_written(link: Link) -> None:
    answers = iter([False] * 5)
    link.start("a", 4)
    link.wait("d", Kind.STARTED)
    link.grant("a", (5,))
    link.push("a", 0, (1,), 0, layers=(0, 1), is_computed=lambda: next(answers, True))
    link.push("a", 0, (1,), 0, layers=(1, 2), is_computed=lambda: True)
    link.push("a", 1, (), 4, token_id=1)
    link.wait("d", Kind.COMMITTED)
    assert next(answers, "all asked") == "all asked"
    link.assert_arrived({1: 5})


@pytest.mark.parametrize("layers", [(-1, 1), (1, 1), (0, 3)])
def test_layers_that_there_are_not_fail_the_transfer(link: Link, layers: LayerRange) -> None:
    link.start("a", 4)
    link.wait("d", Kind.STARTED)
    link.grant("a", (5,))
    link.push("a", 0, (1,), 0, layers=layers)
    assert "layers: must be" in link.wait("p", Kind.FAILED).reason
    link.assert_arrived({})


def test_neighbours_on_both_sides_travel_as_one_whatever_order_they_are_in(link: Link) -> None:
    link.start("a", 20)
    link.wait("d", Kind.STARTED)
    link.grant("a", (9, 8, 7, 3, 4))
    link.push("a", 0, (5, 4, 3, 10, 11), 20, token_id=1)
    receipt = link.wait("d", Kind.COMMITTED).receipt
    assert receipt is not None
    assert receipt.num_descriptors == 2
    link.assert_arrived({5: 9, 4: 8, 3: 7, 10: 3, 11: 4})


@pytest.mark.parametrize("first_block", range(5))
@pytest.mark.parametrize("early", [True, False])
def test_blocks_that_the_decode_node_has_do_not_travel(
    link: Link, first_block: int, early: bool
) -> None:
    """A push may lie before, across or behind the first block that is granted."""
    sources, targets = (0, 2, 4, 6), (9, 3, 15, 7)
    link.start("a", 16)
    link.wait("d", Kind.STARTED)
    if early:
        link.grant("a", targets[first_block:], first_block=first_block)
    link.push("a", 0, sources[:3], 12)
    link.push("a", 3, sources[3:], 16, token_id=6)
    if not early:
        link.grant("a", targets[first_block:], first_block=first_block)
    receipt = link.wait("d", Kind.COMMITTED).receipt
    link.assert_arrived(dict(zip(sources[first_block:], targets[first_block:], strict=True)))
    assert receipt is not None
    assert receipt.num_blocks == 4 - first_block
    assert (receipt.num_bytes == 0) == (first_block == 4)


@pytest.mark.parametrize(("first_block", "num_blocks"), [(1, 4), (5, 0), (2**31 - 1, 4), (3, 0)])
def test_a_grant_that_leaves_out_or_adds_blocks_fails_the_transfer(
    link: Link, first_block: int, num_blocks: int
) -> None:
    link.start("a", 16)
    link.wait("d", Kind.STARTED)
    link.grant("a", tuple(range(num_blocks)), first_block=first_block)
    link.push("a", 0, (0, 2, 4, 6), 16, token_id=6)
    assert "bad grant" in link.wait("p", Kind.FAILED).reason
    link.wait("d", Kind.FAILED)
    link.assert_arrived({})
