"""Unit tests of SessionPlaces: what is remembered about sessions is bounded."""

from __future__ import annotations

from router.fleet.prefix.prefix_index import PrefixIndex
from router.fleet.prefix.prompt_hashes import PromptHashes
from router.fleet.prefix.session_places import MAX_NODES, SessionPlaces

PROMPT = PromptHashes(range(64))


def test_the_least_recently_used_sessions_are_forgotten() -> None:
    places = SessionPlaces(PrefixIndex(), max_sessions=2)
    for session in (b"a", b"b", b"a", b"c"):
        places.note_placement(session, ["p", "d"], PROMPT)
    assert len(places) == 2
    assert places.nodes_of(b"b") == set()
    assert places.nodes_of(b"a") == places.nodes_of(b"c") == {"p", "d"}


def test_a_session_with_very_many_nodes_counts_as_unknown() -> None:
    """A hint that ends pins must reach all nodes that have pins of the session."""
    places = SessionPlaces(PrefixIndex())
    for number in range(MAX_NODES):
        places.note_placement(b"a", [f"p{number}"], PROMPT)
    assert len(places.nodes_of(b"a")) == MAX_NODES
    for number in range(1000):
        places.note_placement(b"a", [f"d{number}"], PROMPT)
    assert places.nodes_of(b"a") == set()
    assert len(places._sessions[b"a"].engine_ids) == MAX_NODES + 1
