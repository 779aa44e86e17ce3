"""A prefill node whose prompts wait for encode nodes is neither stalled nor busy.

A node that decodes image files is busy, but not stalled.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.link.words import NodeBeat, NodeRole
from router.fleet.node import STALLED_S, LegDelta, LegWork
from router.gate.capacity import Capacity
from router.gate.scaling import SMOOTHING_S, ScalingSignals
from tests.fakes.router.nodes import HandNode, join_pair, make_pool
from tests.fakes.time.virtual_clock import VirtualClock


class Reader:
    """Stands for a call, which reads nothing."""

    def on_leg_delta(self, item: LegDelta) -> None: ...

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None: ...


class Scene:
    """A pair of nodes, of which the prefill node has prompts to compute."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100_000.0)
        self.pool = make_pool(clock=self.clock)
        self.prefill: HandNode = join_pair(self.pool)[0]
        self.capacity = Capacity(lambda: self.pool.fleet, clock=self.clock)
        self.signals = ScalingSignals(self.pool, clock=self.clock)
        self._epoch = 0

    def open_prompts(self, num_prompts: int) -> None:
        for _ in range(num_prompts):
            self._epoch += 1
            work = LegWork(num_tokens=100_000, num_uncomputed=100_000)
            self.prefill.node.open_leg(str(self._epoch), self._epoch, Reader(), work)

    def pass_time(self, seconds: float, **beat: Any) -> None:
        for _ in range(int(seconds * 4)):
            self.clock.advance(0.25)
            self.pool.on_event(self.prefill.node, NodeBeat(num_free_blocks=10, **beat))
            self.prefill.node.watch()
            self.signals.tick()

    @property
    def is_ejected(self) -> bool:
        return self.prefill.node.health.is_unwanted(0)

    @property
    def pressure(self) -> float:
        signal = self.signals.signal(NodeRole.PREFILL)
        assert signal is not None
        return signal.pressure


def test_a_node_whose_prompts_all_wait_is_idle_and_not_ejected() -> None:
    scene = Scene()
    scene.open_prompts(3)
    assert not scene.capacity.has_time()
    scene.pass_time(1000.0, num_waiting=3, num_waiting_for_encodings=3)
    assert not scene.is_ejected
    assert scene.capacity.has_time(), "the waiting prompts close the gate to no other request"
    assert scene.pressure == 0
    scene.pass_time(SMOOTHING_S, num_running=3)
    assert not scene.capacity.has_time(), "the prompts are computed now"
    assert scene.pressure > 0.5


def test_prompts_that_wait_hide_no_prompt_that_is_stalled() -> None:
    scene = Scene()
    scene.open_prompts(4)
    whole_s = scene.prefill.node.load.prefill_queue_s
    beat = {"num_waiting": 3, "num_waiting_for_encodings": 3, "num_running": 1}
    scene.pass_time(STALLED_S, **beat)
    assert scene.prefill.node.load.prefill_queue_s == pytest.approx(whole_s / 4)
    assert not scene.is_ejected
    scene.pass_time(10_000.0, **beat)
    assert scene.is_ejected


def test_a_node_that_decodes_image_files_is_busy_and_not_ejected() -> None:
    scene = Scene()
    scene.open_prompts(3)
    whole_s = scene.prefill.node.load.prefill_queue_s
    scene.pass_time(1000.0, num_waiting=3, num_decoding_images=2, num_waiting_for_encodings=1)
    assert not scene.is_ejected
    assert scene.prefill.node.load.prefill_queue_s == pytest.approx(whole_s * 2 / 3)
    assert not scene.capacity.has_time()
    assert scene.pressure > 0.5
    ejected = []
    for _ in range(100):
        scene.pass_time(10.0, num_running=1, num_waiting=2, num_decoding_images=2)
        ejected.append(scene.is_ejected)
    assert any(ejected), "the running prompt is stalled"


def test_a_node_whose_prompts_all_wait_for_cached_kv_is_not_ejected() -> None:
    scene = Scene()
    scene.open_prompts(3)
    scene.pass_time(1000.0, num_waiting=3, num_waiting_for_prefixes=3)
    assert not scene.is_ejected
    beat = {"num_waiting": 2, "num_waiting_for_prefixes": 2, "num_running": 1}
    ejected = []
    for _ in range(100):
        scene.pass_time(10.0, **beat)
        ejected.append(scene.is_ejected)
    assert any(ejected), "the running prompt is stalled"


def test_a_prompt_that_the_node_has_not_reported_yet_counts() -> None:
    scene = Scene()
    scene.open_prompts(1)
    scene.pass_time(1.0, num_waiting=1, num_waiting_for_encodings=1)
    scene.open_prompts(1)
    assert not scene.capacity.has_time()
