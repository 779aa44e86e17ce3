"""Probes: sometimes pick a more expensive node in order to measure it again.

A node that looks slow gets no prompts, so nothing corrects the estimate of its speed, which may
stem from one bad prompt or a busy machine. So a node that had no prompt for a long time gets one
cheap prompt as a probe. The longer ago the node's last prompt was, the more a probe may cost.

A node that looks about as fast as the chosen node needs no probe: if it gets no prompts, the reason
is not its estimate but other nodes' caches, and a probe would compute a cached prompt again.
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
# A probe's cost may exceed the cost of the best place by at most this share of the time since the
# node's last prompt. This limits the time that probes of one node take.
PROBE_SHARE = 0.01
MOST_EXTRA_S = 1.0
# The excess must also be at most this share of the time until the request's deadline.
DEADLINE_SHARE = 0.1
MAX_LOOKED_AT = 4  # maximum number of nodes of each role that are looked at per request
# A node gets a probe only if its estimate is at least this factor slower than the chosen node's;
# smaller differences may be errors of the estimates.
LEAST_SLOWNESS = 1.25


def find_probe(terms: CostTerms, best: Place) -> Place | None:
    """Return the cheapest place that is due for a probe and costs more than ``best``, or None.

    A place is due if its node got no prompt for long and looks slower than the node of ``best``.

    Args:
        best: the place that is used if there is no probe.
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
        local_place(terms, decode_terms(terms, node, is_alone=True), best.cost_s)
        for node in _due(terms, fleet.self_prefilling, best)
    ]
    affordable = [place for place in found if _is_affordable(terms, place, best)]
    return min(affordable, key=lambda place: place.cost_s, default=None)


def _due(terms: CostTerms, nodes: Sequence[NodeLoad], best: Place) -> list[NodeLoad]:
    """Return idle nodes that had no prompt for long and look slower than the node of ``best``.

    If there are many nodes, each request looks at only a few, which differ between requests.
    """
    if len(nodes) > MAX_LOOKED_AT:
        nodes = _few_from(nodes, hash(terms.now) % len(nodes))
    return [
        node
        for node in nodes
        if terms.now - node.prefill_asked_at >= PROBE_AFTER_S
        and not node.num_uncomputed_requests
        and _looks_slower(terms, node, _computing(best))
    ]


def _few_from(nodes: Sequence[NodeLoad], first: int) -> list[NodeLoad]:
    """Return `MAX_LOOKED_AT` nodes from a place on; the first nodes follow the last one."""
    return [nodes[place % len(nodes)] for place in range(first, first + MAX_LOOKED_AT)]


def _looks_slower(terms: CostTerms, node: NodeLoad, chosen: NodeLoad) -> bool:
    """Return whether a node looks much slower than ``chosen`` at computing this prompt."""
    num_missing = terms.num_missing(node)
    num_cached = terms.num_tokens - num_missing
    chosen_s = chosen.prompt_s(num_missing, num_cached)
    return node.prompt_s(num_missing, num_cached) >= LEAST_SLOWNESS * chosen_s


def _computing(place: Place) -> NodeLoad:
    """Return the node that computes the prompt at a place."""
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
