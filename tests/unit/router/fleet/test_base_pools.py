"""Unit tests of several base models' pools: a node joins its own base model's, or none."""

from __future__ import annotations

import dataclasses

import pytest

from baton.api.errors import ConfigError
from baton.checkpoint.model_identity import SIMULATED
from baton.link.words import NodeRegistration, NodeRole
from router.fleet.base_pools import BasePools
from router.fleet.node_pool import NodePool
from tests.fakes.router.nodes import make_registration


def pool(**identity: str) -> NodePool:
    return NodePool(own_identity=identity, max_model_len=100)


def node(**identity: str) -> NodeRegistration:
    return make_registration("d0", NodeRole.DECODE, differs=identity)


def test_a_node_joins_the_base_model_of_its_configuration() -> None:
    pools = [pool(model="A", tokenizer="t"), pool(model="B", tokenizer="t")]
    both = BasePools(pools, ["/a", "/b"])
    for own, model in zip(pools, "AB", strict=True):
        registration = node(model=model, tokenizer="t", weights="any")
        assert both.refusal(registration) == ""
        assert both.find_pool(registration) is own


def test_fine_tunes_of_one_configuration_are_told_apart_by_their_weights() -> None:
    pools = [pool(model="A", weights="1"), pool(model="A", weights="2")]
    both = BasePools(pools, ["/a", "/b"])
    assert both.find_pool(node(model="A", weights="1")) is pools[0]
    assert both.find_pool(node(model="A", weights="2")) is pools[1]
    assert both.find_pool(node(model="A", weights=SIMULATED)) is pools[0]
    refusal = both.refusal(node(model="A", weights="3"))
    assert refusal == (
        "model: d0 has model 'A', weights '3', tokenizer 'unknown', which is none of this router's "
        "models: /a, /b"
    )


def test_new_weights_of_the_only_base_model_of_a_configuration_may_join_for_a_rollout() -> None:
    pools = [pool(model="A", weights="1"), pool(model="B", weights="2")]
    both = BasePools(pools, ["/a", "/b"])
    new = node(model="B", weights="3")
    assert both.refusal(new) == ""
    assert both.find_pool(new) is pools[1]


def test_a_node_of_no_base_model_is_refused_with_a_short_line() -> None:
    both = BasePools([pool(model="A"), pool(model="B")], ["/a", "/b"])
    assert "model 'C'" in both.refusal(node(model="C"))
    assert len(both.refusal(node(model="C\n" * 1000))) < 300
    odd = dataclasses.replace(node(model="C"), node_name="\x1b")
    assert both.refusal(odd).startswith("node_name: must have at most")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "A", "tokenizer": "t"}, {"model": "A", "tokenizer": "t"}),
        ({"model": "A", "weights": "1"}, {"model": "A"}),  # the weights are not where it runs
    ],
)
def test_base_models_that_nodes_could_mix_up_are_refused_at_the_start(
    one: dict[str, str], other: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"^model: /a and /b cannot be told apart"):
        BasePools([pool(**one), pool(**other)], ["/a", "/b"])
