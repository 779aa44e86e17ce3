"""Fleets of any size for tests of routing policies: the router's own ledgers, no nodes behind."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from baton.link.words import NodeRole, StepTime
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import Account, NodeLoad, SharedRates
from router.policies.base import Placement, RouteQuery, RoutingPolicy
from tests.fakes.router.nodes import make_registration


class FleetBook:
    """Prefill nodes p0, p1, ... and decode nodes d0, d1, ..., each reaching all of the others.

    Args:
        step_times: profile of every node; empty: nodes have none.
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
        registration = dataclasses.replace(
            make_registration(name, role, max_model_len=10_000),
            num_blocks=20_000,
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
        """Return a fleet of all nodes but some, joined in this or the opposite order."""
        step = -1 if backwards else 1
        return Fleet(
            [n for n in self.prefills[::step] if n.node_name not in without],
            [n for n in self.decodes[::step] if n.node_name not in without],
            self.reach,
            self_prefilling=self.decodes if may_self_prefill else (),
        )

    def place(self, policy: RoutingPolicy, query: RouteQuery, fleet: Fleet) -> Placement:
        """Have a policy pick nodes, and count the request there, as the router does."""
        placement = policy.pick(query, fleet)
        assert placement is not None
        num_tokens = query.num_prompt_tokens
        num_uncomputed = num_tokens - placement.num_cached_tokens
        for node in (*self.prefills, *self.decodes):
            if node is placement.prefill:
                account = node.note_opened(num_uncomputed, num_uncomputed=num_uncomputed)
                self.accounts.append((node, account))
                self.num_placed[node.node_name] += 1
            if node is placement.decode:
                account = node.note_opened(
                    num_tokens + query.max_tokens,
                    num_uncomputed=0 if placement.prefill else num_uncomputed,
                    num_arriving=num_tokens,
                )
                self.accounts.append((node, account))
                self.num_placed[node.node_name] += 1
        return placement


def names(placement: Placement | None) -> tuple[str, str]:
    """Return the names of a pair's nodes; the prefill node's is empty if there is none."""
    assert placement is not None
    return placement.prefill.node_name if placement.prefill else "", placement.decode.node_name
