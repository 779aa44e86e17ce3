"""Tests of the choice of encode nodes: by cost, once per fleet, never a node that failed."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from baton.api.images import ImageSpan, PromptImage
from baton.link.words import (
    CancelCommand,
    EncodeCommand,
    NodeRole,
    PeerReport,
    PeerUpdate,
    StepTime,
)
from router.fleet.encodings.encode_places import BARRED_S, EncodePlan, encode_seconds
from router.fleet.encodings.encode_work import EncodeWork
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import PREFILL_RECEIPT, HandNode, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock


def image(name: str, first: int = 0, num_tokens: int = 64) -> PromptImage:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return PromptImage(ImageSpan(first, num_tokens, digest), name.encode())


class Fleet:
    """Two encode nodes and two prefill nodes that reach each other."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pool: NodePool = make_pool(clock=self.clock)
        self.p = [self._join(f"p{i}", NodeRole.PREFILL) for i in range(2)]
        self.e = [self._join(f"e{i}", NodeRole.ENCODE) for i in range(2)]
        for encoder in self.e:
            for prefill in self.p:
                self.report(encoder, prefill)
                self.report(prefill, encoder)
        self._epoch = 0

    def _join(self, name: str, role: NodeRole) -> HandNode:
        registered = make_registration(name, role, encodes_images=True, max_model_len=1600)
        if role is NodeRole.PREFILL:
            info = f"encodings of {name}".encode()
            registered = dataclasses.replace(registered, encodings_peer_info=info)
        else:
            registered = dataclasses.replace(
                registered, compatibility={"model": "digest"}, encode_times=(StepTime(64, 0.1),)
            )
        return HandNode(self.pool, registered)

    def report(self, node: HandNode, peer: HandNode, *, connected: bool = True) -> None:
        """Let a node report about a peer."""
        self.pool.on_event(node.node, PeerReport(peer.node.engine_id, connected))

    def work(self, *images: PromptImage, prefill: int = 0, cached: int = 0) -> EncodeWork:
        self._epoch += 1
        node = self.p[prefill].node
        return self.pool.plan_encodings("call", self._epoch, images, node, cached)

    def plan(self, *images: PromptImage, prefill: int = 0, cached: int = 0) -> EncodePlan | None:
        return self.work(*images, prefill=prefill, cached=cached).plan

    def where(self, *images: PromptImage, prefill: int = 0, cached: int = 0) -> list[str]:
        plan = self.plan(*images, prefill=prefill, cached=cached)
        assert plan is not None
        return [engine_id[:2] for engine_id in plan.engine_ids]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_encode_nodes_and_prefill_nodes_are_introduced(fleet: Fleet) -> None:
    (first, _) = fleet.e[0].of(PeerUpdate)
    assert first.peer_info == b"encodings of p0"
    about = [one.engine_id for one in fleet.p[0].of(PeerUpdate)]
    assert about == ["e0-0", "e1-0"]
    assert not fleet.pool.expects_pair, "an encode node is no half of a pair"
    assert fleet.pool.is_eligible(fleet.e[0].node)


def test_work_is_divided_among_encode_nodes_and_spills_over_to_the_prefill_node(
    fleet: Fleet,
) -> None:
    images = [image(str(number), 64 * number) for number in range(20)]
    # An encoding takes 0.1 s there, and counts as 0.8 s on the prefill node.
    assert fleet.where(*images) == ["e0", "e1"] * 8 + [""] * 4


def test_an_image_goes_where_its_encoding_is_kept(fleet: Fleet) -> None:
    assert fleet.where(image("cat")) == ["e0"]
    assert fleet.where(image("cat"), prefill=1) == ["e0"], "e1 is idle, but e0 has it"
    plan = fleet.plan(image("cat"), image("dog", 64))
    assert plan is not None
    fleet.pool.encode_places.note_computed(plan, [image("cat"), image("dog", 64)], PREFILL_RECEIPT)
    assert fleet.where(image("cat"), image("dog", 64)) == ["", ""], "p0 keeps both"
    assert fleet.where(image("cat"), prefill=1) == ["e0"]


def test_nobody_encodes_what_the_prefix_cache_has(fleet: Fleet) -> None:
    assert fleet.where(image("cat"), image("dog", 64), cached=64) == ["", "e0"]


def test_equal_images_of_a_prompt_are_sent_once(fleet: Fleet) -> None:
    plan = fleet.plan(image("cat"), image("cat", 64))
    assert plan is not None
    assert [name[:2] for name in plan.engine_ids] == ["e0", "e0"]
    assert [len(images) for _, images in plan.by_node] == [1]


def test_a_node_whose_encodings_do_not_come_gets_none_for_a_while(fleet: Fleet) -> None:
    plan = fleet.plan(image("cat"))
    assert plan is not None
    lost = dataclasses.replace(PREFILL_RECEIPT, num_encodings_lost=1, lost_images=(0,))
    fleet.pool.encode_places.note_computed(plan, [image("cat")], lost)
    assert fleet.where(image("dog"), prefill=1) == ["e1"]
    fleet.clock.advance(BARRED_S + 1)
    assert fleet.where(image("bird"), prefill=1) == ["e0"]


def test_a_prompt_waits_for_what_stands_in_an_encode_nodes_queue(fleet: Fleet) -> None:
    images = [image(str(number), 64 * number) for number in range(4)]
    plan = fleet.plan(*images)
    assert plan is not None
    assert plan.expected_s == pytest.approx(0.2), "two images on each node"
    again = fleet.plan(images[0], prefill=1)
    assert again is not None
    assert again.expected_s == pytest.approx(0.2), "the first encoding of it has not ended"
    fleet.pool.encode_places.note_computed(plan, images, PREFILL_RECEIPT)
    kept = fleet.work(images[0], prefill=1)
    assert (kept.engine_ids[0][:2], kept.expected_s) == ("e0", 0.0)


def test_only_an_encode_node_that_both_sides_report_gets_images(fleet: Fleet) -> None:
    (prefill, _), (encoder, other) = fleet.p, fleet.e
    fleet.report(other, prefill, connected=False)
    fleet.report(prefill, encoder, connected=False)
    assert fleet.plan(image("cat")) is None
    fleet.report(prefill, encoder)
    assert fleet.where(image("cat")) == ["e0"]
    newcomer = fleet._join("e2", NodeRole.ENCODE)
    fleet.report(newcomer, prefill)
    cats = [image(str(number), 64 * number) for number in range(3)]
    assert "e2" not in fleet.where(*cats), "it would lose the encodings, and be barred for it"
    fleet.report(prefill, newcomer)
    dogs = [image(f"dog {number}", 64 * number) for number in range(3)]
    assert "e2" in fleet.where(*dogs)


def test_only_the_node_whose_encoding_was_lost_gets_none_for_a_while(fleet: Fleet) -> None:
    images = [image("cat"), image("dog", 64)]
    plan = fleet.plan(*images)
    assert plan is not None
    assert [name[:2] for name in plan.engine_ids] == ["e0", "e1"]
    lost = dataclasses.replace(PREFILL_RECEIPT, num_encodings_lost=1, lost_images=(1, 99))
    fleet.pool.encode_places.note_computed(plan, images, lost)
    others = [image(str(number), 64 * number) for number in range(2)]
    assert fleet.where(*others, prefill=1) == ["e0", "e0"]
    assert fleet.where(image("cat"), prefill=1) == ["e0"], "the encoding of e0 is kept"


def test_an_image_that_no_encode_node_can_keep_stays_on_the_prefill_node(fleet: Fleet) -> None:
    assert fleet.where(image("wall", num_tokens=2000)) == [""]


def test_without_encode_nodes_there_is_no_plan(fleet: Fleet) -> None:
    fleet.pool.remove(fleet.e[0].node)
    assert fleet.where(image("cat")) == ["e1"]
    fleet.pool.remove(fleet.e[1].node)
    assert fleet.plan(image("dog")) is None
    gone = [one.engine_id for one in fleet.p[0].of(PeerUpdate) if one.removed]
    assert gone == ["e0-0", "e1-0"]


def test_an_attempt_commands_each_encode_node_and_cancels_once(fleet: Fleet) -> None:
    cat, dog = image("cat"), image("dog", 64)
    work = fleet.work(cat, dog)
    work.send_commands(5.0)
    for encoder, own in zip(fleet.e, (cat, dog), strict=True):
        (command,) = encoder.of(EncodeCommand)
        assert (command.request_id, command.epoch, command.timeout_s) == ("call", 1, 5.0)
        assert (command.prefill_engine_id, command.images) == ("p0-0", (own,))
    for _ in range(2):
        work.end()
    assert all(encoder.of(CancelCommand) == [CancelCommand("call", 1)] for encoder in fleet.e)


@pytest.mark.parametrize("num_lost", [0, 1])
def test_what_waits_on_encode_nodes_is_cancelled_if_the_prompt_did_without(
    fleet: Fleet, num_lost: int
) -> None:
    work = fleet.work(image("cat"))
    work.note_computed(dataclasses.replace(PREFILL_RECEIPT, num_encodings_lost=num_lost))
    assert len(fleet.e[0].of(CancelCommand)) == num_lost
    work.end()
    assert len(fleet.e[0].of(CancelCommand)) == num_lost


def test_an_attempt_without_encode_nodes_asks_nothing(fleet: Fleet) -> None:
    work = fleet.pool.plan_encodings("call", 1, [image("cat")], None, 0)
    work.send_commands(5.0)
    work.end()
    assert (work.plan, work.engine_ids) == (None, ())
    assert not any(encoder.of(EncodeCommand) for encoder in fleet.e)


def test_times_are_estimated_from_the_measured_ones() -> None:
    times = (StepTime(10, 0.1), StepTime(20, 0.3))
    assert encode_seconds(times, 30) == pytest.approx(0.5)
    assert encode_seconds(times, 1) == pytest.approx(0.1)
    assert encode_seconds(times[:1], 30) == pytest.approx(0.3)
    assert encode_seconds((), 1000) == pytest.approx(1.0)
