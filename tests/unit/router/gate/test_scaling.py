"""Unit tests of ScalingSignals: the busiest node counts, and silence is no sign of idleness."""

from __future__ import annotations

from typing import Any

import pytest

from baton.link.words import NodeBeat, NodeRole
from router.gate.scaling import MOST, SMOOTHING_S, ScalingSignals
from router.gate.scaling_options import ScalingOptions
from router.intake.fleet_metrics import collect_scaling
from tests.fakes.router.nodes import HandNode, join_pair, make_pool
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE


class Scene:
    """A pool of pairs, and its signals."""

    def __init__(self, num_pairs: int = 2, *, queue_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.pool = make_pool(clock=self.clock)
        pairs = [join_pair(self.pool, i) for i in range(num_pairs)]
        self.prefills = [pair[0] for pair in pairs]
        self.decodes = [pair[1] for pair in pairs]
        for node in (*self.prefills, *self.decodes):
            self.say(node)
        options = ScalingOptions(scaling_ttft_s=2.0, scaling_itl_s=0.05)
        self.signals = ScalingSignals(self.pool, options, queue_s=lambda: queue_s, clock=self.clock)

    def say(self, node: HandNode, **beat: Any) -> None:
        self.pool.on_event(node.node, NodeBeat(**{"num_free_blocks": 10, **beat}))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.clock.advance(0.25)
            self.signals.tick()

    def pressure(self, role: NodeRole) -> float:
        signal = self.signals.signal(role)
        assert signal is not None
        return signal.pressure

    def demand(self, role: NodeRole) -> float:
        signal = self.signals.signal(role)
        assert signal is not None
        return signal.demand


def test_idle_nodes_want_nothing() -> None:
    scene = Scene()
    scene.pass_time(60)
    assert scene.demand(P) == scene.demand(D) == 0.0


def test_a_prefill_node_that_is_busy_all_the_time_is_as_busy_as_one_may_be() -> None:
    scene = Scene()
    scene.say(scene.prefills[1], num_uncomputed_tokens=10)
    scene.pass_time(SMOOTHING_S)
    assert scene.pressure(P) == pytest.approx(0.63, abs=0.02)
    scene.pass_time(5 * SMOOTHING_S)
    assert scene.pressure(P) == pytest.approx(1.0, abs=0.01)
    assert scene.demand(P) == pytest.approx(2.0, abs=0.02), "not the mean of the two"
    scene.say(scene.prefills[1])
    scene.pass_time(5 * SMOOTHING_S)
    assert scene.pressure(P) < 0.02


def test_a_queue_that_takes_longer_than_a_first_token_may_wants_more_nodes() -> None:
    assert Scene(queue_s=3.0).demand(P) == pytest.approx(3.0)
    assert Scene(queue_s=1e6).demand(P) == 2 * MOST


@pytest.mark.parametrize(
    ("beat", "pressure"),
    [
        ({"num_free_blocks": 1}, 0.9),  # of ten
        ({"num_free_blocks": 0, "num_waiting": 2, "num_running": 4}, 1.5),
    ],
)
def test_the_fullest_decode_node_counts(beat: dict[str, int], pressure: float) -> None:
    scene = Scene()
    scene.say(scene.decodes[0], **beat)
    assert scene.pressure(D) == pytest.approx(pressure)
    assert scene.demand(D) == pytest.approx(2 * pressure)


@pytest.mark.parametrize("why", ["num_uncomputed_tokens", "num_waiting_for_adapters"])
def test_requests_that_wait_for_other_things_than_room_do_not_ask_for_nodes(why: str) -> None:
    scene = Scene()
    waiting = {why: 50 if "tokens" in why else 1}
    scene.say(scene.decodes[0], num_free_blocks=9, num_waiting=1, num_running=1, **waiting)
    assert scene.pressure(D) < 0.5


def test_a_slow_step_counts_where_something_decodes() -> None:
    scene = Scene()
    load = scene.decodes[0].node.load
    load.step.num_measured, load.num_batch, load.step_base_s = 1, 1, 0.1
    assert scene.pressure(D) == pytest.approx(2.0)
    load.num_batch = 0
    assert scene.pressure(D) == 0.0


def test_nodes_that_are_missing_make_nobody_seem_idle() -> None:
    scene = Scene()
    scene.say(scene.decodes[0], num_free_blocks=2)
    lost = scene.decodes[1].node.registration
    scene.decodes[1].leave()
    scene.pool.lost_nodes.note_missing(lost)
    assert scene.demand(D) == pytest.approx(2 * 0.8), "it is to come back"
    scene.decodes[0].leave()
    assert scene.signals.signal(D) is None
    families = collect_scaling(scene.signals)
    assert {one.labels["role"] for family in families for one in family.samples} == {"prefill"}


def test_what_left_is_forgotten() -> None:
    scene = Scene()
    scene.say(scene.prefills[0], num_uncomputed_tokens=10)
    scene.pass_time(100)
    scene.prefills[0].leave()
    scene.pass_time(1)
    assert scene.pressure(P) < 0.01
