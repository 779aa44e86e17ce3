"""BasePools: one pool of nodes per base model. A node joins the pool of the model it serves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from baton.api.errors import ConfigError
from baton.checkpoint.model_identity import identity_of
from baton.link.words import NodeRegistration
from router.fleet.join_gate import JoinGate
from router.fleet.node import Node
from router.fleet.node_claims import registration_problem
from router.fleet.node_pool import NodePool
from router.fleet.served_identity import count_fitting

MAX_SHOWN_CHARS = 64  # maximum number of characters of each entry that an error quotes
_TELLING_KEYS = ("model", "weights", "tokenizer")  # entries of a node's identity that errors show


class BasePools:
    """The pools of a router with several base models.

    Args:
        pools: the pool of each base model; all share one gate.
        models: each base model as the router's options name it, for errors.

    Raises:
        ConfigError: two base models cannot be told apart by what nodes report about their model.
    """

    def __init__(self, pools: Sequence[NodePool], models: Sequence[str]) -> None:
        self._pools, self._models = pools, models
        for (one, model), (other, same) in combinations(zip(pools, models, strict=True), 2):
            mine, theirs = one.own_identity, other.own_identity
            if all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys()):
                raise ConfigError(
                    f"model: {model} and {same} cannot be told apart: config, tokenizer and chat "
                    "template are equal, and the weights of both must be where this router runs"
                )

    @property
    def gate(self) -> JoinGate:
        """Gate that decides which nodes may join now, over all base models."""
        return self._pools[0].gate

    @property
    def members(self) -> list[Node]:
        """All joined nodes, whichever base model they serve."""
        return [node for pool in self._pools for node in pool.members]

    def refusal(self, registration: NodeRegistration) -> str:
        """Return why this node can never join; empty if it can join now or later."""
        if problem := registration_problem(registration):
            return problem
        pool = self._find(registration)
        if pool is not None:
            return pool.refusal(registration)
        entries = registration.compatibility
        shown = ", ".join(
            f"{key} {entries.get(key, 'unknown')[:MAX_SHOWN_CHARS]!a}" for key in _TELLING_KEYS
        )
        return (
            f"model: {registration.node_name} has {shown}, which is none of this router's models: "
            f"{', '.join(self._models)}"
        )

    def find_pool(self, registration: NodeRegistration) -> NodePool:
        """Return the pool of the base model that a node serves; call only if `refusal` is empty."""
        pool = self._find(registration)
        assert pool is not None, "a node that fits no base model is refused"
        return pool

    def _find(self, registration: NodeRegistration) -> NodePool | None:
        """Return the pool of the base model that a node serves, or None if no pool fits.

        All entries that a pool's and the node's identity both have must be equal; the pool with the
        most equal entries wins. If no pool fits in this way, but a single base model has the node's
        configuration, the node joins this model's pool even with other weights or another
        tokenizer, as in a rollout of new weights. If several base models have this configuration,
        the node could join the wrong one, so it joins none.
        """
        identity = identity_of(registration.compatibility)
        fitting = [(count_fitting(pool.own_identity, identity), pool) for pool in self._pools]
        exact = [(number, pool) for number, pool in fitting if number is not None]
        if exact:
            return max(exact, key=lambda one: one[0])[1]
        model = registration.compatibility.get("model")
        alike = [pool for pool in self._pools if pool.own_identity["model"] == model]
        return alike[0] if len(alike) == 1 else None
