"""Unit tests of health: which nodes are ejected, for how long, and how they come back."""

from __future__ import annotations

import asyncio

import pytest

from baton.link.words import NodeRole
from router.calls.recovery.retry_budget import RetryOptions
from router.fleet.fleet_choice import ejected
from router.fleet.health import (
    FAILURES,
    FIRST_PAUSE_S,
    LEAST_WEIGHT,
    LONGEST_PAUSE_S,
    WARMING_S,
    HealthState,
    NodeHealth,
)
from router.fleet.node import LegWork
from tests.fakes.router.nodes import HandNode, failure, join_pair, make_pool, make_registration
from tests.fakes.router.router_scene import Scene, asynchronous
from tests.fakes.time.virtual_clock import VirtualClock


class Watched:
    """One node's health on a virtual clock."""

    def __init__(self, *, is_canary: bool = False) -> None:
        self.clock = VirtualClock()
        self.num_changes = 0
        self.health = NodeHealth("n", self._count, is_canary=is_canary, clock=self.clock)

    def _count(self) -> None:
        self.num_changes += 1

    def pass_time(self, seconds: float) -> HealthState:
        self.clock.advance(seconds)
        self.health.tick()
        return self.health.state

    def fail(self, count: int = FAILURES, partner: str = "") -> HealthState:
        for _ in range(count):
            self.health.note_failure(partner, "it broke")
        return self.health.state


def test_a_node_that_fails_again_and_again_is_ejected_and_comes_back_as_a_canary() -> None:
    node = Watched()
    assert node.fail(FAILURES - 1) is HealthState.SERVING
    assert node.fail(1) is HealthState.EJECTED
    assert node.health.why == "it broke"
    assert node.health.is_unwanted(0)
    assert node.pass_time(FIRST_PAUSE_S - 0.01) is HealthState.EJECTED
    assert node.pass_time(0.01) is HealthState.CANARY
    assert not node.health.is_unwanted(0)
    assert node.health.is_unwanted(1)
    node.health.note_success()
    assert node.health.state is HealthState.WARMING
    assert not node.health.is_unwanted(5)
    assert node.health.weight == pytest.approx(LEAST_WEIGHT)
    node.pass_time(WARMING_S / 2)
    assert node.health.weight == pytest.approx((1 + LEAST_WEIGHT) / 2)
    assert node.pass_time(WARMING_S / 2) is HealthState.SERVING
    assert node.health.weight == 1.0
    assert node.num_changes == 4


def test_a_success_in_between_forgives() -> None:
    node = Watched()
    for _ in range(10):
        assert node.fail(FAILURES - 1) is HealthState.SERVING
        node.health.note_success()


def test_a_canary_is_ejected_at_its_first_failure_and_each_pause_is_longer() -> None:
    node = Watched()
    node.fail()
    pause_s = FIRST_PAUSE_S
    for _ in range(8):
        assert node.pass_time(pause_s - 0.01) is HealthState.EJECTED
        assert node.pass_time(0.01) is HealthState.CANARY
        assert node.fail(1) is HealthState.EJECTED
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert pause_s == LONGEST_PAUSE_S


def test_pauses_are_short_again_after_it_was_well_for_long() -> None:
    node = Watched()
    node.fail()
    node.pass_time(FIRST_PAUSE_S)
    node.health.note_success()
    node.pass_time(WARMING_S)
    node.pass_time(LONGEST_PAUSE_S + 1)
    node.fail()
    assert node.pass_time(FIRST_PAUSE_S) is HealthState.CANARY


def test_what_passes_between_two_is_blamed_only_on_who_has_it_with_several() -> None:
    node = Watched()
    assert node.fail(10, partner="d0") is HealthState.SERVING
    assert node.fail(1, partner="d1") is HealthState.EJECTED


def test_never_more_than_half_are_ejected_those_that_failed_first() -> None:
    pool = make_pool()
    nodes = [HandNode(pool, make_registration(f"p{i}", NodeRole.PREFILL)).node for i in range(5)]
    for node in nodes[1:]:
        node.health.eject("ill")
    nodes[0].health.state = HealthState.CANARY
    assert [node.name for node in ejected(nodes)] == ["p1", "p2"]
    assert [node.name for node in ejected(nodes[:1])] == []


def test_a_new_node_among_busy_ones_gets_one_request_at_a_time_until_it_answers() -> None:
    pool = make_pool()
    (p0, d0), (_, d1) = join_pair(pool, 0), join_pair(pool, 1)
    assert all(node.health.state is HealthState.SERVING for node in pool.nodes)
    p0.node.open_leg("a", 1, Silent(), LegWork(num_tokens=1))
    p2 = HandNode(pool, make_registration("p2", NodeRole.PREFILL))
    for decode in (d0, d1):
        p2.reach(decode)
    assert p2.node.health.state is HealthState.CANARY
    assert "p2" in names(pool.fleet.prefills)
    p2.node.open_leg("b", 2, Silent(), LegWork(num_tokens=1))
    assert "p2" not in names(pool.fleet.prefills)
    p2.node.close_leg(2)
    assert "p2" in names(pool.fleet.prefills)
    p2.node.health.note_success()
    p2.node.open_leg("c", 3, Silent(), LegWork(num_tokens=1))
    assert "p2" in names(pool.fleet.prefills)
    pool.count_missed_beats()
    assert p2.node.load.weight < 1


def test_ejected_nodes_are_used_when_the_others_reach_nobody() -> None:
    pool = make_pool()
    (p0, d0), _ = join_pair(pool, 0), join_pair(pool, 1)  # p0-d0 and p1-d1, nothing else
    p0.node.health.eject("ill")
    assert names(pool.fleet.prefills) == ["p1"]
    pool.nodes[1].health.eject("ill, too")  # d1
    assert names(pool.fleet.prefills) == ["p0", "p1"]
    d0.leave()
    assert names(pool.fleet.prefills) == ["p1"]


@asynchronous
async def test_nodes_that_break_are_blamed_by_what_they_say() -> None:
    options = RetryOptions(max_attempts=FAILURES + 1, first_pause_s=0, longest_pause_s=0)
    scene = Scene(options=options)
    await scene.call()
    for _ in range(FAILURES):
        epoch = scene.epoch
        scene.prefill.say(failure("a", "INTERNAL", "prefill: the engine broke", epoch=epoch))
        await scene.pause()
    assert scene.prefill.node.health.state is HealthState.EJECTED
    assert scene.decode.node.health.state is HealthState.SERVING
    assert scene.prefill.node.health.why == "prefill: the engine broke"
    assert scene.task is not None
    scene.task.cancel()
    await asyncio.gather(scene.task, return_exceptions=True)


class Silent:
    """A listener that ignores everything."""

    def on_leg_delta(self, item: object) -> None: ...

    def on_token(self, role: NodeRole, output_index: int, token_id: int) -> None: ...


def names(views: object) -> list[str]:
    return [view.node_name for view in views]  # type: ignore[attr-defined]
