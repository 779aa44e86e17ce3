"""Makes the fleet: the nodes that may get requests, except those that look unhealthy.

At most half of a role's nodes are left out: if most nodes look unhealthy, the cause is probably not
in the nodes, and some nodes must do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from baton.link.words import PAIR_ROLES, NodeRole
from router.fleet.fleet import Fleet
from router.fleet.health import HealthState
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import Node
from router.fleet.peers.pairing import Reach


def make_fleet(ready: Iterable[Node], reach: Reach, *, may_self_prefill: bool) -> Fleet:
    """Return the fleet of the nodes that are ready and look healthy.

    Args:
        ready: nodes that neither drain nor are stuck.
        reach: which nodes are connected.
        may_self_prefill: whether decode nodes may compute prompts.
    """
    nodes = list(ready)
    prefills, decodes = (
        [node for node in nodes if node.registration.role is role] for role in PAIR_ROLES
    )
    unwanted = {node.engine_id for some in (prefills, decodes) for node in ejected(some)}

    def make(without: Set[str]) -> Fleet:
        alone = [node for node in decodes if node.registration.computes_prompts]
        return Fleet(
            _loads_of(prefills, without),
            _loads_of(decodes, without),
            reach.bandwidths,
            self_prefilling=_loads_of(alone, without) if may_self_prefill else (),
        )

    # If no healthy nodes are connected, use unhealthy nodes, too.
    return make(unwanted) or make(set())


def make_prompt_fleet(ready: Iterable[Node], may_serve: Callable[[str], bool]) -> Fleet:
    """Return the fleet for pooled prompts, which need only a prefill node.

    Each prefill node is paired with itself, so that policies can place a pooled prompt like any
    other.

    Args:
        ready: nodes that neither drain nor are stuck.
        may_serve: returns whether nodes of a revision may get requests.
    """
    prefills = [node for node in ready if node.registration.role is NodeRole.PREFILL]
    prefills = [node for node in prefills if may_serve(node.load.revision)] or prefills
    unwanted = {node.engine_id for node in ejected(prefills)}
    loads = _loads_of(prefills, unwanted)
    return Fleet(loads, loads, {load.engine_id: {load.engine_id: 0.0} for load in loads})


def ejected(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return the nodes of one role that get no requests now, at most half of the nodes.

    If not all unwanted nodes can be left out, ejected nodes are left out before canaries: nodes on
    trial that are busy with the one request that they may have.
    """
    unwanted = [node for node in nodes if node.health.is_unwanted(node.num_open)]
    unwanted.sort(key=lambda node: (node.health.state is not HealthState.EJECTED, node.name))
    return unwanted[: len(nodes) // 2]


def _loads_of(nodes: Sequence[Node], without: Set[str]) -> list[NodeLoad]:
    return [node.load for node in nodes if node.engine_id not in without]
