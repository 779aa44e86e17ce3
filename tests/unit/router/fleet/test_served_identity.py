"""Unit tests of the identity served when nodes have several models: no silent change."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping

import pytest

from baton.api.errors import NodeUnavailableError
from baton.checkpoint.model_identity import IDENTITY_KEYS, SIMULATED
from baton.kv.block_hash import DEFAULT_HASH_ALGORITHM
from baton.link.words import (
    DecodeCommand,
    DrainSeen,
    NodeBeat,
    NodeRole,
    PrefillCommand,
    SendKVSnapshot,
    ServingState,
)
from router.api.admin.views import describe_node
from router.calls.recovery.retry_budget import RetryOptions
from router.fleet.node_pool import NodePool
from router.fleet.served_identity import SETTLE_S
from router.intake.metrics import RouterMetrics
from tests.fakes.router.nodes import MODEL, HandNode, failure, make_registration, token_1
from tests.fakes.router.router_scene import Scene, asynchronous
from tests.fakes.time.virtual_clock import VirtualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE
DRAINED = NodeBeat(num_free_blocks=10, serving_state=ServingState.DRAINED)
SERVING = NodeBeat(num_free_blocks=10)


class Fleet:
    """A router, and decode nodes that compute prompts alone; a node's name begins with its weights.

    ``weights``: that the router's own folder has; empty: none.
    """

    def __init__(self, weights: str = "") -> None:
        self.clock = VirtualClock()
        own = {"model": MODEL, "tokenizer": "t", **({"weights": weights} if weights else {})}
        self.pool = NodePool(
            own_identity=own, max_model_len=1000, may_self_prefill=True, clock=self.clock
        )
        self.nodes: dict[str, HandNode] = {}

    def join(
        self, *names: str, settled: bool = True, differs: Mapping[str, str] | None = None
    ) -> None:
        for name in names:
            entries = {"tokenizer": "t", "weights": name[0], **(differs or {})}
            registration = dataclasses.replace(
                make_registration(name, D, differs=entries),
                computes_prompts=True,
                prefix_hash=DEFAULT_HASH_ALGORITHM,
            )
            self.nodes[name] = HandNode(self.pool, registration)
        if settled:
            self.clock.advance(SETTLE_S + 0.1)

    def say(self, name: str, beat: NodeBeat) -> None:
        self.pool.on_event(self.nodes[name].node, beat)

    @property
    def serving(self) -> list[str]:
        return [node.node_name for node in self.pool.fleet.self_prefilling]


def test_a_node_with_other_weights_gets_nothing_and_everybody_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet("a")
    with caplog.at_level(logging.WARNING):
        fleet.join("a0", "b0")
    why = "weights differs: it has b, this router's --model has a"
    assert f"b0 gets no requests: {why}" in caplog.text
    assert fleet.serving == ["a0"]
    described = describe_node(fleet.pool, fleet.nodes["b0"].node)
    assert (described.health, described.health_why) == ("not serving", why)
    text = RouterMetrics(fleet.pool).text().decode()
    assert 'baton_router_nodes{role="decode",state="not_serving"} 1.0' in text
    assert 'baton_router_nodes{role="decode",state="ready"} 1.0' in text
    assert not fleet.nodes["b0"].of(SendKVSnapshot)  # nothing of its cache is known
    assert fleet.nodes["a0"].of(SendKVSnapshot)


@pytest.mark.parametrize("order", list(itertools.permutations(["a0", "b0", "b1"])))
def test_the_folder_decides_whoever_comes_first_and_whoever_is_more(order: list[str]) -> None:
    fleet = Fleet("a")
    for name in order:
        fleet.join(name)
        assert set(fleet.serving) <= {"a0"}
    assert fleet.serving == ["a0"]
    assert fleet.pool.identity.num_changes_total == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["a0", "b0", "b1"])))
def test_without_weights_in_the_folder_the_order_of_a_restart_decides_nothing(
    order: list[str],
) -> None:
    fleet = Fleet()
    fleet.join(*order, settled=False)
    assert fleet.serving == ["b0", "b1"]


def test_who_serves_goes_on_when_others_become_more() -> None:
    fleet = Fleet()
    fleet.join("a0")
    fleet.join("b0", "b1", "b2")
    assert fleet.serving == ["a0"]
    assert fleet.pool.why_no_pair() != ""


@pytest.mark.parametrize("weights", ["", "a"])
def test_others_serve_when_the_last_one_has_drained_and_it_is_told(
    weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(weights)
    fleet.join("a0", "a1")
    fleet.join("b0")
    fleet.say("a0", DRAINED)
    assert fleet.serving == ["a1"]
    with caplog.at_level(logging.WARNING):
        fleet.say("a1", DRAINED)
    assert fleet.serving == ["b0"]
    assert fleet.nodes["b0"].of(SendKVSnapshot)
    assert fleet.nodes["a1"].of(DrainSeen)
    assert "serves another model from now on" in caplog.text
    assert "weights b" in caplog.text
    assert "weights a" in caplog.text
    assert ("after a restart the router will not serve" in caplog.text) is bool(weights)
    fleet.say("a1", SERVING)  # it is not to be drained after all
    assert fleet.serving == (["a1"] if weights else ["b0"])
    assert fleet.pool.identity.num_changes_total == (2 if weights else 1)


@pytest.mark.parametrize("weights", ["", "a"])
def test_others_serve_when_the_last_one_was_removed_and_not_when_it_was_lost(weights: str) -> None:
    fleet = Fleet(weights)
    fleet.join("a0")
    fleet.join("b0")
    fleet.nodes["a0"].leave()
    assert fleet.serving == []
    assert fleet.pool.why_no_pair().startswith("no node serves this model (b0: ")
    fleet.join("a0")
    assert fleet.serving == ["a0"]
    fleet.pool.expel("a0")
    assert fleet.serving == ["b0"]


@pytest.mark.parametrize("order", list(itertools.permutations(["a0", "a1", "b0", "b1"])))
@pytest.mark.parametrize("is_settled", [True, False])
def test_two_routers_of_one_folder_serve_the_same_in_whatever_order_they_hear_of_nodes(
    order: list[str], is_settled: bool
) -> None:
    """Check in each step that the nodes of both routers have the same weights."""
    first, second = Fleet("a"), Fleet("a")

    def served() -> set[str]:
        return {name[0] for fleet in (first, second) for name in fleet.serving}

    for one, other in zip(["a0", "a1", "b0", "b1"], order, strict=True):
        first.join(one, settled=is_settled)
        second.join(other, settled=is_settled)
        assert served() <= {"a"}
    assert first.serving == second.serving == ["a0", "a1"]
    nodes_of_a = [name for name in order if name.startswith("a")]
    for name in nodes_of_a:
        first.say(name, DRAINED)
    assert first.serving == ["b0", "b1"]
    for name in reversed(nodes_of_a):
        second.say(name, DRAINED)
    assert second.serving == ["b0", "b1"]
    for fleet, name in ((first, nodes_of_a[0]), (second, nodes_of_a[0])):
        fleet.say(name, SERVING)
    assert first.serving == second.serving == [nodes_of_a[0]]


def test_a_lost_node_that_an_operator_removes_makes_room() -> None:
    fleet = Fleet("a")
    fleet.join("a0", "b0")
    while fleet.serving:
        fleet.pool.count_missed_beats()
        fleet.say("b0", SERVING)
    assert [lost.node_name for lost in fleet.pool.lost] == ["a0"]
    fleet.pool.expel("a0")
    assert fleet.serving == ["b0"]


@pytest.mark.parametrize("key", [key for key in IDENTITY_KEYS if key != "model"])
def test_whatever_decides_tokens_is_compared(key: str) -> None:
    fleet = Fleet()
    fleet.join("a0")
    fleet.join("a1", differs={key: "odd"})
    assert fleet.serving == ["a0"]
    assert fleet.pool.identity.problem(fleet.nodes["a1"].node).startswith(f"{key} differs: ")


def test_nodes_with_another_tokenizer_than_the_router_never_serve() -> None:
    fleet = Fleet()
    fleet.join("a0", differs={"tokenizer": "odd"})
    assert fleet.serving == []
    fleet.join("a1")
    fleet.say("a1", DRAINED)
    assert fleet.serving == []


def test_simulated_nodes_fit_any_folder_and_no_real_ones() -> None:
    fleet = Fleet("a")
    fleet.join("s0", differs={"weights": SIMULATED})
    assert fleet.serving == ["s0"]
    fleet.join("a0")
    assert fleet.serving == ["s0"]


@asynchronous
async def test_an_output_never_goes_on_with_another_model() -> None:
    scene = Scene(options=RetryOptions(trial_pause_s=0, pair_timeout_s=0.05, return_timeout_s=0.05))
    await scene.call()
    others = [
        HandNode(scene.pool, make_registration(name, role, differs={"weights": "b"}))
        for name, role in (("p9", P), ("d9", D))
    ]
    others[0].reach(others[1])
    scene.prefill.say(token_1("a", 10, epoch=scene.epoch))
    await scene.pause()
    scene.pool.on_event(scene.prefill.node, DRAINED)
    scene.pool.on_event(scene.decode.node, DRAINED)
    assert scene.pool.fleet.decodes == [others[1].node.load]
    scene.decode.say(failure("a", "UNAVAILABLE", "it broke", epoch=scene.epoch))
    with pytest.raises(NodeUnavailableError, match="1 tokens are of a model that is no longer"):
        await scene.end()
    assert not others[0].of(PrefillCommand)
    assert not others[1].of(DecodeCommand)
    assert scene.token_ids == [10]


def test_nodes_that_change_their_weights_are_followed_there_and_back_and_awaited() -> None:
    fleet = Fleet("a")
    fleet.join("a0", "a1")
    fleet.pool.identity.follow_nodes()
    for old, new in (("a", "b"), ("b", "a")):
        for number, left in ((0, [f"{old}1"]), (1, [f"{new}0"])):
            changing = fleet.nodes[f"{old}{number}"]
            changing.node.changes_weights = True
            fleet.say(f"{old}{number}", DRAINED)
            assert fleet.serving == left  # the folder's weights do not take over too early
            changing.leave()
            fleet.join(f"{new}{number}")
        assert fleet.serving == [f"{new}0", f"{new}1"]


def test_calls_wait_for_the_only_node_while_it_changes_its_weights() -> None:
    fleet = Fleet("a")
    fleet.join("a0")
    only = fleet.nodes["a0"]
    only.node.changes_weights = True
    fleet.say("a0", DRAINED)
    assert fleet.pool.awaited_until(60) == fleet.clock() + 60
    only.leave()
    assert fleet.pool.awaited_until(60) == fleet.clock() + 60
    fleet.pool.identity.follow_nodes()
    fleet.join("b0")
    assert fleet.serving == ["b0"]
