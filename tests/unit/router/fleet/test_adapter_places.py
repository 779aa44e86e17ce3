"""AdapterPlaces: which nodes may get a request of an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from baton.link.words import (
    NodeBeat,
    NodeRole,
)
from router.fleet.adapter_places import BARRED_S, EXPECTED_S, MAX_SOURCES, AdapterSource
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import HandNode, make_pool, make_registration
from tests.fakes.time.virtual_clock import VirtualClock

ONE, TWO = "1" * 64, "2" * 64


class Scene:
    """Two prefill and two decode nodes; the second of each can load adapters."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pool: NodePool = make_pool(clock=self.clock)
        self.nodes = {
            f"{role.value[0]}{number}": HandNode(
                self.pool,
                make_registration(f"{role.value[0]}{number}", role, loads_adapters=bool(number)),
            )
            for role in NodeRole
            for number in range(2)
        }
        for prefill in ("p0", "p1"):
            for decode in ("d0", "d1"):
                self.nodes[prefill].reach(self.nodes[decode])

    def beat(self, name: str, *adapters: str, load_s: float = 0.0) -> None:
        beat = NodeBeat(adapters=adapters, adapter_load_s=load_s, num_free_blocks=1)
        self.pool.on_event(self.nodes[name].node, beat)

    def names_of(self, digest: str) -> Sequence[str]:
        fleet = self.pool.adapters.narrow(self.pool.fleet, digest)
        return [node.node_name for node in (*fleet.prefills, *fleet.decodes)]


def test_a_node_takes_what_it_has_or_can_load() -> None:
    scene = Scene()
    adapters = scene.pool.adapters
    assert scene.names_of(ONE) == []
    assert scene.pool.why_no_pair(1, ONE).endswith(f"adapter {ONE[:12]}: its folder is not known")
    scene.beat("p0", ONE)
    assert not scene.pool.can_load_adapter(ONE), "no decode node has it"
    scene.beat("d0", ONE, TWO)
    assert scene.pool.can_load_adapter(ONE)
    assert scene.names_of(ONE) == ["p0", "d0"]
    adapters.set_sources({ONE: AdapterSource("one")})
    assert scene.names_of(ONE) == ["p0", "p1", "d0", "d1"]
    assert adapters.narrow(scene.pool.fleet, ONE) is scene.pool.fleet
    assert adapters.source_of(ONE).folder == "one"
    scene.beat("p1", load_s=2.0)
    assert adapters.load_s(scene.pool.fleet, ONE) == {
        scene.nodes["p1"].node.engine_id: 2.0,
        scene.nodes["d1"].node.engine_id: 0.5,
    }


def test_a_node_that_loads_an_adapter_needs_the_rest_of_the_time() -> None:
    scene = Scene()
    adapters, node = scene.pool.adapters, scene.nodes["p1"].node
    adapters.set_sources({ONE: AdapterSource("one"), TWO: AdapterSource("two")})
    scene.beat("p1", load_s=2.0)

    def load_s(digest: str = ONE) -> float | None:
        return adapters.load_s(scene.pool.fleet, digest).get(node.engine_id)

    adapters.note_placement(node.load, ONE)
    scene.clock.advance(0.5)
    adapters.note_placement(node.load, ONE)
    assert (load_s(), load_s(TWO)) == (1.5, 2.0)
    scene.clock.advance(2.0)
    assert load_s() == 0.0, "it comes at any moment"
    scene.clock.advance(EXPECTED_S)
    assert load_s() == 2.0, "no beat has shown it"
    adapters.note_placement(node.load, ONE)
    assert load_s() == 2.0
    scene.clock.advance(1.0)
    adapters.bar(node.engine_id, ONE, "no such folder")
    assert load_s() == 2.0
    scene.beat("p1", ONE, load_s=2.0)
    assert load_s() is None


def test_a_node_that_could_not_load_it_is_left_out_for_a_while() -> None:
    scene = Scene()
    adapters, engine_id = scene.pool.adapters, scene.nodes["p1"].node.engine_id
    adapters.set_sources({ONE: AdapterSource("one"), TWO: AdapterSource("two")})
    adapters.bar(engine_id, ONE, "no such folder")
    assert scene.names_of(ONE) == []
    assert scene.names_of(TWO) == ["p1", "d1"]
    assert scene.pool.why_no_pair(1, ONE).endswith(f"{ONE[:12]}: p1: no such folder")
    scene.clock.advance(BARRED_S)
    assert scene.names_of(ONE) == ["p1", "d1"]
    adapters.bar(engine_id, ONE, "no such folder")
    adapters.set_sources({ONE: AdapterSource("one", is_pinned=True)})
    assert scene.names_of(ONE) == ["p1", "d1"], "its files may be others now"
    assert adapters.source_of(TWO).folder == "two", "requests may still use it"
    adapters.set_sources({f"{number:064x}": AdapterSource("x") for number in range(MAX_SOURCES)})
    assert adapters.source_of(TWO).folder == ""
