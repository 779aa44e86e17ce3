"""Probes: sometimes pick a more expensive place in order to measure its node again.

A node that looks slow gets no prompts, so nothing corrects its estimate, which may stem from one
bad prompt or a busy machine. So a node without prompts for long gets one that is cheap there; the
longer ago, the more it may cost.

A node that looks about as fast as the chosen one needs no probe: caches keep prompts away from the
node, not its estimate. The next prompt of a conversation would be computed again there.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.load.node_load import NodeLoad
from router.policies.cost_terms import (
    CostTerms,
    Place,
    decode_terms,
    keeps_deadlines,
    local_place,
    pair_place,
    prefill_terms,
)

PROBE_AFTER_S = 30.0
# A probe may cost more than the best place by this share of the time since the node got its last
# prompt, which bounds the time lost to probes of one node.
PROBE_SHARE = 0.01
MOST_EXTRA_S = 1.0
DEADLINE_SHARE = 0.1  # fraction of the time until the request's deadline
MAX_LOOKED_AT = 4  # most nodes of each role that a request looks at
# Estimates are about this exact: a node that looks slower by less needs no probe.
LEAST_SLOWNESS = 1.25


def find_probe(terms: CostTerms, best: Place) -> Place | None:
    """Return the cheapest place that is due for a measurement and worse than ``best``, or None.

    A place is due if its node was not asked for long and looks slower than the node of ``best``.

    Args:
        best: the place to use otherwise.
    """
    if not terms.now or terms.leaves_room:
        return None
    fleet, decode = terms.fleet, best.decode
    found = [
        pair_place(terms, prefill_terms(terms, node), decode)
        for node in _due(terms, fleet.prefills, best)
        if fleet.reaches(node, decode.node)
    ]
    found += [
        local_place(terms, decode_terms(terms, node), best.cost_s)
        for node in _due(terms, fleet.self_prefilling, best)
    ]
    affordable = [place for place in found if _is_affordable(terms, place, best)]
    return min(affordable, key=lambda place: place.cost_s, default=None)


def _due(terms: CostTerms, nodes: Sequence[NodeLoad], best: Place) -> list[NodeLoad]:
    """Return idle nodes without a prompt for long, among a few that vary with each request.

    Leaves out nodes that look about as fast as the node which computes the prompt at ``best``.
    """
    if len(nodes) > MAX_LOOKED_AT:
        first = hash(terms.now) % len(nodes)
        nodes = nodes[first : first + MAX_LOOKED_AT]
    return [
        node
        for node in nodes
        if terms.now - node.prefill_asked_at >= PROBE_AFTER_S
        and not node.num_uncomputed_requests
        and _looks_slower(terms, node, _computing(best))
    ]


def _looks_slower(terms: CostTerms, node: NodeLoad, chosen: NodeLoad) -> bool:
    """Return whether computing a prompt's missing tokens looks slower here than on ``chosen``."""
    num_missing = terms.num_missing(node)
    chosen_s = chosen.prefill.seconds(num_missing)
    return node.prefill.seconds(num_missing) >= LEAST_SLOWNESS * chosen_s


def _computing(place: Place) -> NodeLoad:
    """Return the node that computes the prompt."""
    return place.prefill.node if place.prefill else place.decode.node


def _is_affordable(terms: CostTerms, place: Place, best: Place) -> bool:
    node = _computing(place)
    extra_s = place.cost_s - best.cost_s
    most_s = min(
        PROBE_SHARE * (terms.now - node.prefill_asked_at),
        MOST_EXTRA_S,
        DEADLINE_SHARE * terms.timeout_s,
    )
    return 0 < extra_s <= most_s and (place.prefill is not None or keeps_deadlines(terms, place))
