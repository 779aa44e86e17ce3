"""Unit tests of Fleet: its nodes, and the fleet without ruled-out nodes."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from tests.fakes.router.fleets import FleetBook


def names_of(nodes: Sequence[NodeLoad]) -> list[str]:
    return [node.node_name for node in nodes]


def test_nodes_are_in_the_order_of_their_names() -> None:
    fleet = FleetBook(3, 3).fleet(backwards=True)
    assert names_of(fleet.prefills) == ["p0", "p1", "p2"]
    assert names_of(fleet.decodes) == ["d0", "d1", "d2"]


def test_a_node_without_a_partner_is_not_in_it() -> None:
    book = FleetBook(3, 3)
    book.reach = {"p0-0": {"d1-0": 0.0}, "p1-0": {}}
    fleet = book.fleet()
    assert names_of(fleet.prefills) == ["p0"]
    assert names_of(fleet.decodes) == ["d1"]
    assert fleet.reaches(book["p0"], book["d1"])
    assert not book.fleet(without=["d1"])


def test_each_prefill_node_has_the_decode_nodes_that_it_reaches() -> None:
    book = FleetBook(2, 3)
    book.reach["p0-0"] = dict.fromkeys(["d0-0", "d2-0", "gone"], 0.0)
    fleet = book.fleet()
    assert names_of(fleet.reached_by(book["p0"])) == ["d0", "d2"]
    assert names_of(fleet.reached_by(book["p1"])) == ["d0", "d1", "d2"]
    assert not fleet.reaches(book["p0"], book["d1"])


def test_what_is_left_may_be_narrowed_by_node_and_by_pair() -> None:
    book = FleetBook(2, 2)
    fleet = book.fleet().only(ruled_out={("p0-0", "d0-0")})
    assert not fleet.reaches(book["p0"], book["d0"])
    assert names_of(fleet.reached_by(book["p0"])) == ["d1"]
    assert names_of(fleet.reached_by(book["p1"])) == ["d0", "d1"]
    left = fleet.only(decode=lambda node: node.node_name == "d0")  # keeps what was ruled out
    assert names_of(left.prefills) == ["p1"]
    assert not left.only(prefill=lambda node: node.node_name == "p0")


def test_a_decode_node_that_computes_prompts_itself_needs_no_prefill_node() -> None:
    book = FleetBook(0, 2)
    fleet = Fleet([], book.decodes, {}, self_prefilling=book.decodes)
    assert fleet
    assert names_of(fleet.self_prefilling) == ["d0", "d1"]
    assert fleet.decodes == []
    left = fleet.only(ruled_out={("", "d0-0")})
    assert names_of(left.self_prefilling) == ["d1"]


def test_nodes_that_are_too_small_for_a_request_are_left_out() -> None:
    book = FleetBook(2, 2)
    for node in (*book.prefills, *book.decodes):
        node.num_blocks = 10  # of 16 tokens
    book["p0"].num_blocks = book["d1"].num_blocks = 5
    assert book.fleet().with_room_for(80).prefills == book.fleet().prefills
    fleet = book.fleet().with_room_for(81)
    assert (names_of(fleet.prefills), names_of(fleet.decodes)) == (["p1"], ["d0"])
    assert not book.fleet().with_room_for(161)
    book["p0"].num_blocks, book["p0"].max_model_len = 10, 50  # in room and in what it takes at all
    assert names_of(book.fleet().with_room_for(50).prefills) == ["p0", "p1"]
    assert names_of(book.fleet().with_room_for(51).prefills) == ["p1"]


def test_images_go_only_to_nodes_that_compute_prompts_and_encode_images() -> None:
    book = FleetBook(2, 2)
    fleet = Fleet(book.prefills, book.decodes, book.reach, self_prefilling=book.decodes)
    assert not fleet.encoding_images()
    book["p1"].encodes_images = True
    left = fleet.encoding_images()
    assert names_of(left.prefills) == ["p1"]
    assert names_of(left.decodes) == ["d0", "d1"]  # they need not encode
    assert left.self_prefilling == []
    book["d0"].encodes_images = True
    assert names_of(fleet.encoding_images().self_prefilling) == ["d0"]
    for node in (book["p0"], book["d1"]):
        node.encodes_images = True
    assert fleet.encoding_images() is fleet
