"""Contract of routing policies: tests that use the router's records of nodes, without nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from baton.link.words import NodeRegistration, NodeRole, StepTime
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import Account, NodeLoad, SharedRates
from router.policies.base import Placement, RouteQuery, RoutingPolicy

QUERY = RouteQuery(num_prompt_tokens=100, max_tokens=20)


class FleetBook:
    """A router's records of prefill nodes p0, p1, ... and decode nodes d0, d1, ..., all connected.

    Args:
        step_times: measured step times of every node; empty: nodes have none.
    """

    def __init__(
        self, num_prefill: int, num_decode: int, step_times: tuple[StepTime, ...] = ()
    ) -> None:
        self._step_times = step_times
        self.shared = SharedRates(kv_bytes_per_token=131_072)
        self.now = 0.0
        self.prefills = [self._node(f"p{i}", NodeRole.PREFILL) for i in range(num_prefill)]
        self.decodes = [self._node(f"d{i}", NodeRole.DECODE) for i in range(num_decode)]
        self.reach: dict[str, dict[str, float]] = {
            p.engine_id: {d.engine_id: 0.0 for d in self.decodes} for p in self.prefills
        }
        self.num_placed: Counter[str] = Counter()
        self.accounts: list[tuple[NodeLoad, Account]] = []

    def _node(self, name: str, role: NodeRole) -> NodeLoad:
        registration = NodeRegistration(
            node_name=name,
            engine_id=f"{name}-0",
            role=role,
            version="1",
            address="",
            peer_info=b"",
            compatibility={},
            max_model_len=10_000,
            num_blocks=20_000,
            block_size=16,
            step_times=self._step_times,
        )
        return NodeLoad(registration, self.shared, lambda: self.now)

    def __getitem__(self, name: str) -> NodeLoad:
        return next(n for n in (*self.prefills, *self.decodes) if n.node_name == name)

    def fleet(
        self,
        *,
        backwards: bool = False,
        without: Iterable[str] = (),
        may_self_prefill: bool = False,
    ) -> Fleet:
        """Return a fleet of all nodes except ``without``, in the order of joining or backwards."""
        step = -1 if backwards else 1
        return Fleet(
            [n for n in self.prefills[::step] if n.node_name not in without],
            [n for n in self.decodes[::step] if n.node_name not in without],
            self.reach,
            self_prefilling=self.decodes if may_self_prefill else (),
        )

    def place(self, policy: RoutingPolicy, query: RouteQuery, fleet: Fleet) -> Placement:
        """Let a policy pick nodes for a request; count the request there, as the router does."""
        placement = policy.pick(query, fleet)
        assert placement is not None
        num_tokens = query.num_prompt_tokens
        num_uncomputed = num_tokens - placement.num_cached_tokens
        for node in (*self.prefills, *self.decodes):
            if node is placement.prefill:
                account = node.note_opened(
                    num_uncomputed,
                    num_uncomputed=num_uncomputed,
                    num_cached=placement.num_cached_tokens,
                )
                self.accounts.append((node, account))
                self.num_placed[node.node_name] += 1
            if node is placement.decode:
                account = node.note_opened(
                    num_tokens + query.max_tokens,
                    num_uncomputed=0 if placement.prefill else num_uncomputed,
                    num_cached=placement.num_cached_tokens,
                    num_arriving=num_tokens,
                )
                self.accounts.append((node, account))
                self.num_placed[node.node_name] += 1
        return placement


def names(placement: Placement | None) -> tuple[str, str]:
    """Return the names of the two nodes of a placement; empty if there is no prefill node."""
    assert placement is not None
    return placement.prefill.node_name if placement.prefill else "", placement.decode.node_name


def assert_is_of(placement: Placement | None, fleet: Fleet) -> None:
    """Assert that a placement has connected nodes of this fleet, or a node that may work alone."""
    assert placement is not None, "no place, though nodes reach each other"
    if placement.prefill is None:
        assert placement.decode in fleet.self_prefilling, "a decode node that computes no prompts"
        return
    assert placement.prefill in fleet.prefills
    assert placement.decode in fleet.decodes
    assert fleet.reaches(placement.prefill, placement.decode), "the pair is not connected"


def drawn_fleet(draw: random.Random) -> Fleet:
    """Return some nodes with random loads; each prefill node reaches at least one decode node."""
    book = FleetBook(draw.randint(1, 4), draw.randint(1, 4))
    ids = [decode.engine_id for decode in book.decodes]
    for prefill in book.prefills:
        reached = draw.sample(ids, draw.randint(1, len(ids)))
        book.reach[prefill.engine_id] = {
            engine_id: draw.choice([0.0, 1e9, 4e10]) for engine_id in sorted(reached)
        }
    for node in (*book.prefills, *book.decodes):
        node.weight = draw.choice([1.0, 0.5, 0.01])
        for _ in range(draw.randrange(5)):
            num_tokens = draw.randrange(500)
            node.note_opened(num_tokens, num_uncomputed=num_tokens)
    return book.fleet(may_self_prefill=draw.random() < 0.5)


class PolicyContract:
    """Tests of a routing policy."""

    num_drawn = 100  # fleets

    def make(self) -> RoutingPolicy:
        """Return a new policy."""
        raise NotImplementedError

    def test_it_picks_nodes_that_reach_each_other(self) -> None:
        draw = random.Random(1)
        for _ in range(self.num_drawn):
            policy, fleet = self.make(), drawn_fleet(draw)
            for _ in range(6):
                assert_is_of(policy.pick(QUERY, fleet), fleet)

    def test_equal_calls_give_equal_answers(self) -> None:
        draw = random.Random(2)
        for _ in range(self.num_drawn):
            one, other, fleet = self.make(), self.make(), drawn_fleet(draw)
            for _ in range(6):
                assert names(one.pick(QUERY, fleet)) == names(other.pick(QUERY, fleet))

    def test_the_order_in_which_nodes_joined_does_not_matter(self) -> None:
        one, other, book = self.make(), self.make(), FleetBook(2, 3)
        forwards, backwards = book.fleet(), book.fleet(backwards=True)
        for _ in range(12):
            expected = names(other.pick(QUERY, backwards))
            assert names(book.place(one, QUERY, forwards)) == expected

    def test_it_goes_on_when_nodes_come_and_go(self) -> None:
        policy, book = self.make(), FleetBook(2, 3)
        for without in [(), ("p0",), ("p0", "d1", "d2"), ("d0",), ("p1", "d0", "d1"), ()]:
            fleet = book.fleet(without=without)
            for _ in range(4):
                assert_is_of(book.place(policy, QUERY, fleet), fleet)

    def test_it_finds_no_place_where_there_is_none(self) -> None:
        policy, book = self.make(), FleetBook(1, 1)
        assert policy.pick(QUERY, book.fleet(without=["d0"])) is None
        assert policy.pick(QUERY, book.fleet(without=["p0"])) is None

    def test_it_copes_with_65536_pairs(self) -> None:
        policy, book = self.make(), FleetBook(256, 256)
        fleet = book.fleet()
        for _ in range(64):
            assert_is_of(book.place(policy, QUERY, fleet), fleet)
