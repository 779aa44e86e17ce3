"""Unit tests of PrefixIndex: how much of a prompt each node has, exactly or estimated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from baton.link.words import KVCacheEvents
from router.fleet.prefix import prefix_index
from router.fleet.prefix.prefix_index import MAX_KINDS, PrefixIndex
from router.fleet.prefix.prompt_hashes import HashKind, PromptHashes
from tests.fakes.time.virtual_clock import VirtualClock

KIND = HashKind(4, "xxh3_128")
LIFETIME_S = 100.0


class Scene:
    """An index and nodes that the test lets speak."""

    def __init__(self, *names: str, max_blocks: int = 1000, sweep_blocks: int = 1000) -> None:
        self.clock = VirtualClock()
        self.index = PrefixIndex(
            max_blocks,
            max_placed_blocks=20,
            placement_lifetime_s=LIFETIME_S,
            sweep_blocks=sweep_blocks,
            clock=self.clock,
        )
        self.sequences: dict[str, int] = {}
        for name in names:
            self.index.add_node(name, KIND)

    def say(
        self,
        name: str,
        stored: Sequence[int] = (),
        removed: Sequence[int] = (),
        *,
        snapshot: bool = False,
        lost: int = 0,
    ) -> bool:
        """Let a node speak, after ``lost`` messages that do not arrive."""
        sequence = self.sequences.get(name, 0) + 1 + lost
        self.sequences[name] = sequence
        events = KVCacheEvents(sequence, snapshot, tuple(stored), tuple(removed))
        is_wanted = self.index.apply_events(name, events)
        self.index.check()
        return is_wanted

    def snapshot(self, name: str, *stored: int) -> None:
        assert not self.say(name, stored, snapshot=True)


def prompt(*token_ids: int) -> PromptHashes:
    """Each token fills a block."""
    return PromptHashes([token_id for token_id in token_ids for _ in range(4)])


def test_each_node_is_found_with_its_longest_prefix() -> None:
    scene = Scene("a", "b", "c", "d")
    scene.snapshot("a", 1, 2, 3)
    scene.snapshot("b", 1)
    scene.snapshot("c", 2, 3)  # without the head they are of no use
    scene.snapshot("d")
    assert scene.index.match([1, 2, 3, 4]) == {"a": 3, "b": 1}
    assert scene.index.match([1, 2]) == {"a": 2, "b": 1}
    assert scene.index.match([2]) == {"a": 1, "c": 1}
    assert scene.index.match([9, 1]) == {}
    assert scene.index.match([]) == {}


def test_snapshots_count_at_once_and_are_merged_later() -> None:
    scene = Scene("a", "b", "c")
    scene.snapshot("a", 1, 2, 3)
    scene.snapshot("b", 1, 2)
    scene.snapshot("c", 1)
    assert scene.index.num_blocks == 6
    assert scene.index._held == {}
    for _ in range(4):  # each prompt merges one of the nodes
        assert scene.index.match([1, 2, 3]) == {"a": 3, "b": 2, "c": 1}
        scene.index.check()
    assert len(scene.index._held) == 3


def test_nodes_that_are_not_merged_change_leave_and_report_again() -> None:
    scene = Scene("a", "b", "c")
    for name in ("a", "b", "c"):
        scene.snapshot(name, 1, 2, 3)
    scene.say("a", stored=[4], removed=[2])
    scene.index.remove("b")
    scene.snapshot("c", 1, 2)
    scene.index.check()
    assert scene.index.num_blocks == 5
    assert scene.index.match([1, 2, 3]) == {"a": 1, "c": 2}
    scene.index.merge_some()
    scene.index.check()
    assert scene.index.match([1, 2, 3]) == {"a": 1, "c": 2}


def test_one_prompt_looks_up_few_blocks_in_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_LOOKED_UP", 5)
    scene = Scene("a", "b", "c")
    for name in ("a", "b", "c"):
        scene.snapshot(name, 1, 2, 3)
    found = [scene.index.match([1, 2, 3]) for _ in range(3)]
    assert found == [{"a": 3, "b": 3}, {"a": 3, "b": 3, "c": 3}, {"a": 3, "b": 3, "c": 3}]


def test_a_hole_ends_a_prefix() -> None:
    scene = Scene("a")
    scene.snapshot("a", 1, 2, 3)
    scene.say("a", removed=[2])
    assert scene.index.match([1, 2, 3]) == {"a": 1}
    scene.say("a", stored=[2])
    assert scene.index.match([1, 2, 3]) == {"a": 3}


def test_what_is_stored_twice_is_there_once() -> None:
    scene = Scene("a")
    scene.snapshot("a", 1)
    scene.say("a", stored=[1, 1])
    assert scene.index.num_blocks == 1
    scene.say("a", removed=[1, 7])
    assert scene.index.match([1]) == {}
    assert scene.index.num_blocks == 0


def test_a_snapshot_voids_what_came_before() -> None:
    scene = Scene("a", "b")
    scene.snapshot("a", 1, 2)
    scene.snapshot("b", 1, 2)
    scene.snapshot("a", 5)
    assert scene.index.match([1, 2]) == {"b": 2}
    assert scene.index.match([5]) == {"a": 1}


def test_before_its_snapshot_nothing_that_a_node_says_counts() -> None:
    scene = Scene("a")
    assert not scene.say("a", stored=[1])  # it has been asked already
    assert scene.index.match([1]) == {}
    assert not scene.index.is_exact("a")
    scene.snapshot("a", 1)
    assert scene.index.is_exact("a")


def test_behind_a_gap_a_node_is_asked_once_and_believed_again_from_its_snapshot_on() -> None:
    scene = Scene("a")
    scene.snapshot("a", 1, 2)
    assert scene.say("a", stored=[3], lost=1)
    assert not scene.index.is_exact("a")
    assert scene.index.match([1]) == {}
    assert not scene.say("a", stored=[4])
    scene.snapshot("a", 1)
    assert scene.index.match([1, 2]) == {"a": 1}
    assert not scene.say("a", stored=[2])
    assert scene.index.match([1, 2]) == {"a": 2}


def test_who_went_away_is_not_found_and_its_place_is_given_to_another() -> None:
    scene = Scene("a", "b")
    scene.snapshot("a", 1, 2)
    scene.snapshot("b", 1)
    scene.index.remove("a")
    scene.index.remove("a")
    assert scene.index.match([1, 2]) == {"b": 1}
    assert not scene.say("a", stored=[5])  # on its way when the link broke
    scene.index.add_node("c", KIND)
    scene.snapshot("c", 7)
    assert scene.index.match([1, 2]) == {"b": 1}
    assert len(scene.index._places) == 2


def test_what_a_lost_node_had_is_dropped_in_parts() -> None:
    scene = Scene("a", "b", sweep_blocks=2)
    scene.snapshot("a", 1, 2, 3, 4, 5)
    scene.snapshot("b", 1)
    scene.index.merge_some()
    scene.index.remove("a")
    counts = []
    for _ in range(4):
        scene.say("b")
        counts.append(scene.index.num_blocks)
    assert counts == [4, 2, 1, 1]
    assert scene.index.match([1, 2, 3, 4, 5]) == {"b": 1}


def test_names_of_another_kind_are_another_prompts() -> None:
    scene = Scene("a")
    larger = HashKind(8, "sha256")
    scene.index.add_node("b", larger)
    scene.index.add_node("c", larger)
    asked = PromptHashes(range(21))
    scene.snapshot("a", *asked.of(KIND)[:3])
    scene.snapshot("b", *asked.of(larger))
    scene.snapshot("c", *asked.of(KIND))  # not its kind: a lie, or chance
    assert scene.index.match_tokens(asked) == {"a": 12, "b": 16}


# ---------------------------------------------------------------------- placements


def test_until_a_node_speaks_it_is_thought_to_have_what_it_was_sent() -> None:
    scene = Scene("a", "b")
    scene.index.note_placement("a", prompt(1, 2))
    scene.index.note_placement("b", prompt(1))
    scene.index.note_placement("unknown", prompt(1))
    assert scene.index.match_tokens(prompt(1, 2, 3)) == {"a": 8, "b": 4}
    scene.snapshot("a")
    assert scene.index.match_tokens(prompt(1, 2, 3)) == {"b": 4}


def test_of_a_node_that_speaks_no_placement_is_remembered() -> None:
    scene = Scene("a")
    scene.snapshot("a")
    scene.index.note_placement("a", prompt(1))
    assert scene.say("a", lost=1)
    assert scene.index.match_tokens(prompt(1)) == {}
    scene.index.note_placement("a", prompt(1))
    assert scene.index.match_tokens(prompt(1)) == {"a": 4}


def test_placements_are_forgotten_with_time() -> None:
    scene = Scene("a")
    scene.index.note_placement("a", prompt(1))
    scene.clock.advance(LIFETIME_S / 2)
    scene.index.note_placement("a", prompt(2))
    assert scene.index.match_tokens(prompt(1)) == {"a": 4}
    scene.clock.advance(LIFETIME_S / 2)
    assert scene.index.match_tokens(prompt(1)) == {}
    assert scene.index.match_tokens(prompt(2)) == {"a": 4}
    scene.clock.advance(LIFETIME_S)
    assert scene.index.match_tokens(prompt(2)) == {}


def test_of_many_placements_the_latest_are_remembered() -> None:
    scene = Scene("a")
    for number in range(100):
        scene.index.note_placement("a", prompt(number))
        assert scene.index._placed.num_blocks <= 20
    remembered = [
        number for number in range(100) if scene.index.match_tokens(prompt(number)) == {"a": 4}
    ]
    assert remembered == list(range(80, 100))


def test_a_new_node_does_not_inherit_the_placements_of_one_that_went_away() -> None:
    scene = Scene("a")
    scene.index.note_placement("a", prompt(1))
    scene.index.remove("a")
    scene.index.add_node("b", KIND)
    assert scene.index.match_tokens(prompt(1)) == {}
    scene.clock.advance(LIFETIME_S)
    scene.index.add_node("c", KIND)
    scene.index.add_node("d", KIND)
    assert len(scene.index._places) == 3  # one of them has the place of a
    assert scene.index.match_tokens(prompt(1)) == {}


def test_a_node_that_was_sent_nothing_leaves_its_place_at_once() -> None:
    scene = Scene("a", "silent")
    scene.index.note_placement("silent", prompt(1))
    scene.snapshot("a", 1)
    scene.index.remove("a")
    scene.index.add_node("b", KIND)
    assert len(scene.index._places) == 2


@pytest.mark.medium
def test_nodes_that_come_and_go_leave_no_memory_behind() -> None:
    scene = Scene(max_blocks=10_000)

    def live(number: int) -> None:
        scene.index.add_node("a", KIND)
        scene.index.note_placement("a", prompt(1))  # it has not spoken yet
        scene.sequences.clear()
        scene.snapshot("a", *range(number * 1000, number * 1000 + 1000))
        scene.index.remove("a")

    live(0)
    tracemalloc.start()
    for number in range(100):
        live(number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 500_000  # the blocks of one that is here take 100 kB


# ---------------------------------------------------------------------- too much


def test_what_finds_no_room_is_counted_and_placements_help_out() -> None:
    scene = Scene("a", "b", max_blocks=3)
    held = prompt(1, 2, 3).of(KIND)
    scene.snapshot("a", *held[:2])
    scene.snapshot("b", *held)
    assert scene.index.num_blocks == 3
    assert scene.index.is_exact("a")
    assert not scene.index.is_exact("b")
    assert scene.index.match_tokens(prompt(1, 2, 3)) == {"a": 8, "b": 4}
    scene.index.note_placement("b", prompt(1, 2))
    assert scene.index.match_tokens(prompt(1, 2, 3)) == {"a": 8, "b": 8}


@pytest.mark.parametrize("ends", ["removed", "snapshot"])
def test_a_node_is_exact_again_when_nothing_of_it_is_left_out(ends: str) -> None:
    scene = Scene("a", max_blocks=2)
    scene.snapshot("a", 1, 2, 3, 4)
    assert not scene.index.is_exact("a")
    if ends == "removed":
        scene.say("a", removed=[3])
        assert not scene.index.is_exact("a")
        scene.say("a", removed=[4])
    else:
        scene.index.remove("a")
        scene.index.add_node("a", KIND)
        scene.snapshot("a", 1, 2)
    assert scene.index.is_exact("a")
    assert scene.index.match([1, 2]) == {"a": 2}


def test_nodes_cannot_have_every_prompt_hashed_in_any_number_of_ways() -> None:
    scene = Scene("a")
    for size in range(1, 4 * MAX_KINDS):
        scene.index.add_node(f"liar{size}", HashKind(100 + size, "sha256"))
    prompt = PromptHashes(range(1000))
    scene.index.match_tokens(prompt)
    assert len(prompt._known) == MAX_KINDS
    prompt = PromptHashes(range(32))
    scene.index.add_node("b", KIND)  # of a kind that is known
    scene.index.note_placement("b", prompt)
    assert "b" in scene.index.match_tokens(prompt)
    scene.index.remove("liar1")
    scene.index.add_node("c", HashKind(8, "sha256"))  # there is room again
    scene.index.note_placement("c", prompt)
    assert "c" in scene.index.match_tokens(prompt)


def test_a_node_that_was_left_out_is_indexed_once_there_is_room() -> None:
    scene, prompt = Scene(), PromptHashes(range(32))
    for size in range(1, MAX_KINDS + 1):
        scene.index.add_node(f"n{size}", HashKind(100 + size, "sha256"))
    late = HashKind(8, "sha256")
    scene.index.add_node("late", late)
    scene.index.add_node("late", late)
    assert not scene.say("late", prompt.of(late)), "there is no room yet"
    scene.index.remove("n1")
    assert scene.say("late", prompt.of(late)), "the index asks for a snapshot"
    assert not scene.say("late", prompt.of(late)), "the index asks once"
    scene.snapshot("late", *prompt.of(late))
    assert scene.index.match_tokens(prompt) == {"late": 32}
    assert scene.index.is_exact("late")
    scene.index.check()


def test_nothing_is_kept_of_a_left_out_node_that_left() -> None:
    scene = Scene()
    for size in range(1, MAX_KINDS + 2):
        scene.index.add_node(f"n{size}", HashKind(100 + size, "sha256"))
    scene.index.remove(f"n{MAX_KINDS + 1}")
    assert not scene.index._left_out
