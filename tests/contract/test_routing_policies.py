"""One suite for every registered routing policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policies import POLICIES
from router.policies.base import NodePair, NodeState, RouteQuery

QUERY = RouteQuery(num_prompt_tokens=100, max_tokens=20)

states = st.builds(
    NodeState,
    node_name=st.text(min_size=1, max_size=3),
    engine_id=st.text(min_size=1, max_size=3),
    num_open_requests=st.integers(0, 5),
    num_open_tokens=st.integers(0, 500),
)
pair_lists = st.lists(st.builds(NodePair, states, states), min_size=1, max_size=6)


class Fleet:
    """Two prefill and three decode nodes with the ledgers that a router keeps of them."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()

    def pairs(self) -> list[NodePair]:
        return [
            NodePair(self.state(prefill), self.state(decode))
            for prefill in ("p0", "p1")
            for decode in ("d0", "d1", "d2")
        ]

    def state(self, name: str) -> NodeState:
        return NodeState(
            node_name=name,
            engine_id=f"{name}-x",
            num_open_requests=self.requests[name],
            num_open_tokens=self.tokens[name],
        )

    def place(self, pair: NodePair) -> None:
        self.requests.update([pair.prefill.node_name, pair.decode.node_name])
        self.tokens[pair.prefill.node_name] += QUERY.num_prompt_tokens
        self.tokens[pair.decode.node_name] += QUERY.num_prompt_tokens + QUERY.max_tokens


@pytest.mark.parametrize("name", POLICIES.names())
@given(pairs=pair_lists)
def test_it_picks_one_of_the_pairs(name: str, pairs: list[NodePair]) -> None:
    policy = POLICIES.load(name)()
    for _ in range(3):
        assert policy.pick(QUERY, pairs) in pairs


@pytest.mark.parametrize("name", POLICIES.names())
@given(pairs=pair_lists)
def test_it_is_deterministic_and_does_not_change_what_it_was_given(
    name: str, pairs: list[NodePair]
) -> None:
    one, other = POLICIES.load(name)(), POLICIES.load(name)()
    before = list(pairs)
    assert [one.pick(QUERY, pairs) for _ in range(4)] == [
        other.pick(QUERY, pairs) for _ in range(4)
    ]
    assert pairs == before


@pytest.mark.parametrize("name", POLICIES.names())
def test_it_does_not_depend_on_the_order_of_the_pairs(name: str) -> None:
    one, other = POLICIES.load(name)(), POLICIES.load(name)()
    pairs = Fleet().pairs()
    assert [one.pick(QUERY, pairs) for _ in range(6)] == [
        other.pick(QUERY, pairs[::-1]) for _ in range(6)
    ]


@pytest.mark.parametrize("name", POLICIES.names())
def test_it_spreads_equal_requests_evenly_over_the_nodes_of_each_role(name: str) -> None:
    policy, fleet = POLICIES.load(name)(), Fleet()
    for _ in range(60):
        fleet.place(policy.pick(QUERY, fleet.pairs()))
    assert [fleet.requests[node] for node in ("p0", "p1")] == [30, 30]
    assert [fleet.requests[node] for node in ("d0", "d1", "d2")] == [20, 20, 20]


@pytest.mark.parametrize("name", POLICIES.names())
def test_it_goes_on_when_pairs_come_and_go(name: str) -> None:
    policy, pairs = POLICIES.load(name)(), Fleet().pairs()
    for size in (6, 1, 3, 1, 6):
        assert policy.pick(QUERY, pairs[:size]) in pairs[:size]


def test_least_tokens_avoids_the_busy_prefill_node_first_and_then_the_busy_decode_node() -> None:
    fleet = Fleet()
    fleet.tokens.update({"p0": 10, "d0": 5, "d1": 0, "d2": 1})
    pair = POLICIES.load("least_tokens")().pick(QUERY, fleet.pairs())
    assert (pair.prefill.node_name, pair.decode.node_name) == ("p1", "d1")
