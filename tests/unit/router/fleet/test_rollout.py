"""Unit tests of Rollout: revisions are never mixed, get their share, can be held and undone."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.api.errors import InvalidRequestError, NotFoundError
from baton.link.words import REVISION, DrainCommand, NodeBeat, NodeRole, PeerUpdate, ServingState
from router.fleet.node_pool import NodePool
from router.fleet.rollout import MAX_REMEMBERED, Rollout
from tests.fakes.router.nodes import HandNode, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE
OLD, NEW = "v1", "v2"


class Scene:
    """A pool, and nodes that report each peer they are told of as reached."""

    def __init__(self, *, may_self_prefill: bool = False) -> None:
        self.clock = VirtualClock()
        self.pool = make_pool(may_self_prefill=may_self_prefill, clock=self.clock)
        self.nodes: dict[str, HandNode] = {}

    def join(self, name: str, role: NodeRole, revision: str, **differs: str) -> HandNode:
        entries = {**differs, **({REVISION: revision} if revision else {})}
        node = HandNode(self.pool, make_registration(name, role, differs=entries))
        self.nodes[name] = node
        for one in self.nodes.values():
            for update in one.of(PeerUpdate):
                peer = self.pool.node(update.engine_id)
                if peer is not None:
                    one.reach(self.nodes[peer.name])
        node.node.health.note_success()
        return node

    def join_all(self, revision: str, num_prefill: int, num_decode: int) -> None:
        for i in range(num_prefill):
            self.join(f"p{i}{revision}", P, revision)
        for i in range(num_decode):
            self.join(f"d{i}{revision}", D, revision)

    def leave(self, name: str) -> None:
        self.nodes.pop(name).leave()

    def shares(self) -> dict[str, float]:
        """Return each revision's share one second from now."""
        _ = self.pool.fleet
        self.clock.advance(1.0)
        return {name: round(share, 3) for name, share in self.pool.rollout.shares().items()}

    def turns(self, count: int) -> Counter[str]:
        """Return how many of ``count`` requests without a session each revision gets."""
        _ = self.pool.fleet
        placed: Counter[str] = Counter()
        for _ in range(count):
            chosen = self.pool.rollout.choose()
            assert chosen is not None
            placed[chosen.prefills[0].revision] += 1
        return placed


def pairs_of(pool: NodePool) -> set[tuple[str, str]]:
    return {
        (prefill.revision, decode.revision)
        for prefill in pool.fleet.prefills
        for decode in pool.fleet.reached_by(prefill)
    }


def test_nodes_of_two_revisions_are_never_introduced_though_all_else_is_equal() -> None:
    scene = Scene()
    scene.join_all(OLD, 2, 2)
    scene.join_all(NEW, 2, 2)
    for node in scene.nodes.values():
        revision = node.node.registration.revision
        known = {scene.pool.node(update.engine_id) for update in node.of(PeerUpdate)}
        assert {one.registration.revision for one in known if one} == {revision}
    assert pairs_of(scene.pool) == {(OLD, OLD), (NEW, NEW)}


@pytest.mark.parametrize("revision", ["", NEW])
def test_nodes_without_a_revision_are_of_one_of_their_own(revision: str) -> None:
    scene = Scene()
    scene.join_all(revision, 1, 1)
    assert pairs_of(scene.pool) == {(revision, revision)}
    assert scene.pool.rollout.state == "steady"
    assert scene.pool.rollout.choose() is None


@pytest.mark.parametrize(("role", "letter"), [(P, "p"), (D, "d")])
def test_a_revision_without_nodes_of_a_role_gets_nothing_even_if_they_could_do_alone(
    role: NodeRole, letter: str
) -> None:
    scene = Scene(may_self_prefill=True)
    scene.join_all(OLD, 1, 1)
    scene.join(f"{letter}new", role, NEW)
    fleet = scene.pool.fleet
    nodes = (*fleet.prefills, *fleet.decodes, *fleet.self_prefilling)
    assert {node.revision for node in nodes} == {OLD}
    assert [
        view.state
        for view in scene.pool.rollout.view([one.node.load for one in scene.nodes.values()], fleet)
    ] == ["serving", "incomplete"]


@pytest.mark.parametrize(
    ("old", "new", "share"),
    [
        ((3, 3), (1, 1), 0.25),
        ((2, 2), (2, 2), 0.5),
        ((3, 1), (1, 3), 0.5),
        ((1, 1), (3, 3), 0.75),
        ((4, 4), (1, 4), 0.2 / (0.2 + 0.5)),  # four decode nodes help one prefill node little
    ],
)
def test_shares_are_of_the_role_of_which_a_revision_has_less(
    old: tuple[int, int], new: tuple[int, int], share: float
) -> None:
    scene = Scene()
    scene.join_all(OLD, *old)
    scene.join_all(NEW, *new)
    assert scene.shares()[NEW] == pytest.approx(share, abs=0.001)
    assert scene.turns(1000)[NEW] == pytest.approx(1000 * share, abs=1)


def test_traffic_moves_as_nodes_come_and_go_forward_and_back() -> None:
    scene = Scene()
    scene.join_all(OLD, 2, 2)
    scene.join_all(NEW, 2, 2)
    assert scene.shares() == {OLD: 0.5, NEW: 0.5}
    beat = NodeBeat(serving_state=ServingState.DRAINING)
    scene.pool.on_event(scene.nodes[f"p0{OLD}"].node, beat)  # drains: its half is gone at once
    assert scene.shares()[OLD] == pytest.approx((1 / 3) / (1 / 3 + 1 / 2), abs=0.001)
    for name in (f"p0{OLD}", f"p1{OLD}"):
        scene.leave(name)
    assert pairs_of(scene.pool) == {(NEW, NEW)}
    scene.join_all(OLD, 1, 0)
    assert scene.shares()[OLD] == pytest.approx((1 / 3) / (1 / 3 + 1 / 2), abs=0.001)


def test_a_session_stays_where_it_is_unless_shares_move_it() -> None:
    scene = Scene()
    scene.join_all(OLD, 2, 2)
    scene.join_all(NEW, 2, 2)

    def places() -> dict[str, str]:
        _ = scene.pool.fleet
        scene.clock.advance(1.0)
        chosen = {f"s{i}": scene.pool.rollout.choose(f"s{i}") for i in range(400)}
        return {session: fleet.prefills[0].revision for session, fleet in chosen.items() if fleet}

    before = places()
    assert before == places()
    assert Counter(before.values())[NEW] == pytest.approx(200, abs=50)
    scene.leave(f"p0{OLD}")
    after = places()
    assert Counter(after.values())[NEW] == pytest.approx(240, abs=50)
    assert not [s for s in after if before[s] == NEW and after[s] == OLD]


def test_paused_new_nodes_get_nothing_more_until_it_goes_on() -> None:
    scene = Scene()
    scene.join_all(OLD, 2, 2)
    scene.pool.rollout.pause()
    scene.pool.note_eligibility_change()
    scene.join_all(NEW, 2, 2)
    assert scene.shares() == {OLD: 1.0, NEW: 0.0}
    assert scene.turns(100) == {OLD: 100}
    assert {
        scene.pool.rollout.choose(f"s{i}").prefills[0].revision  # type: ignore[union-attr]
        for i in range(50)
    } == {OLD}
    assert scene.pool.rollout.state == "paused"
    scene.pool.rollout.resume()
    assert scene.shares() == {OLD: 0.5, NEW: 0.5}


def test_what_was_held_serves_no_longer_than_it_is_there() -> None:
    scene = Scene()
    scene.join_all(OLD, 1, 1)
    scene.pool.rollout.pause()
    scene.join_all(NEW, 1, 1)
    scene.leave(f"d0{OLD}")
    assert pairs_of(scene.pool) == {(NEW, NEW)}


def test_undone_a_revision_gets_nothing_while_another_one_is_complete() -> None:
    scene = Scene()
    scene.join_all(OLD, 1, 1)
    scene.join_all(NEW, 3, 3)
    assert scene.pool.rollout.undo() == NEW
    scene.pool.note_eligibility_change()
    assert pairs_of(scene.pool) == {(OLD, OLD)}
    assert scene.pool.rollout.state == "undone"
    scene.leave(f"p0{OLD}")  # better an undone one than none
    assert pairs_of(scene.pool) == {(NEW, NEW)}
    scene.join_all(OLD, 1, 0)
    assert pairs_of(scene.pool) == {(OLD, OLD)}
    scene.pool.rollout.resume()
    scene.pool.note_eligibility_change()
    assert pairs_of(scene.pool) == {(OLD, OLD), (NEW, NEW)}


def test_undo_names_what_there_is() -> None:
    scene = Scene()
    scene.join_all(OLD, 1, 1)
    with pytest.raises(InvalidRequestError, match="there is only one"):
        scene.pool.rollout.undo()
    scene.join_all(NEW, 1, 1)
    with pytest.raises(NotFoundError, match="there are v1, v2"):
        scene.pool.rollout.undo("v3")
    assert scene.pool.rollout.undo(OLD) == OLD


def test_what_is_remembered_of_revisions_is_bounded() -> None:
    rollout = Rollout()
    for number in range(3 * MAX_REMEMBERED):
        rollout.note_joined(f"r{number}", {f"r{number}"})
    assert len(rollout._seen) == MAX_REMEMBERED


def test_no_crowd_of_revisions_makes_one_forgotten_that_is_here_or_undone() -> None:
    scene = Scene()
    scene.join_all(OLD, 1, 1)
    scene.join_all(NEW, 1, 1)
    assert scene.pool.rollout.undo(NEW) == NEW
    for name in (f"p0{NEW}", f"d0{NEW}"):
        scene.leave(name)
    for number in range(2 * MAX_REMEMBERED):
        scene.join(f"liar{number}", P, f"r{number}").leave()
    scene.join_all(NEW, 1, 1)
    assert pairs_of(scene.pool) == {(OLD, OLD)}
    states = {
        view.name: view.state
        for view in scene.pool.rollout.view(
            [one.load for one in scene.pool.nodes], scene.pool.fleet
        )
    }
    assert states == {OLD: "serving", NEW: "undone"}


def test_decode_nodes_alone_serve_where_no_revision_is_complete() -> None:
    scene = Scene(may_self_prefill=True)
    scene.pool.allow_self_prefill(True)
    for name, revision in (("d0", OLD), ("d1", NEW)):
        scene.join(name, D, revision)
    states = {
        view.name: view.state
        for view in scene.pool.rollout.view(
            [one.node.load for one in scene.nodes.values()], scene.pool.fleet
        )
    }
    assert set(states) == {OLD, NEW}
    assert not scene.nodes["d0"].of(DrainCommand)
