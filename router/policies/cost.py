"""Cost: picks the nodes where a request adds the least time to all requests, including itself.

    prefill node      wait for its queue + this prompt's tokens that are not cached there
    between the two   transfer time beyond the prefill; wait for KV room on D
    decode node       this request's steps, and how much longer all other requests' steps get
    or local on D     wait for its queue + tokens not cached on D + pause of all that decode there

D is the decode node. `Cost` does not list all pairs: it computes the least cost of each node alone,
and tries pairs of the best nodes until no other pair can be better. docs/routing.md has the formula
and an example.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.policies.base import Candidate, Placement, RouteQuery
from router.policies.cost_terms import (
    LINK_LATENCY_S,
    CostTerms,
    Place,
    decode_costs,
    decode_terms,
    keeps_deadlines,
    local_place,
    pair_place,
    prefill_costs,
    prefill_terms,
)
from router.policies.probes import find_probe

# Costs that differ by less than this many seconds count as equal, because estimates are inexact. Of
# nearly equal nodes, the node that was sent the fewest tokens so far wins, so that all caches get
# used. For prefill nodes, the second number, a share of the lowest cost, is added to the first.
PREFILL_NEAR_S, PREFILL_NEAR = 0.0005, 0.02
DECODE_NEAR_S = 0.0001
CLOSE_ENOUGH_S = 0.0003
# Maximum number of nodes of each role, of pairs, and of nodes with the longest cache hits that a
# search considers.
MAX_NODES, MAX_PAIRS, MAX_HITS = 16, 64, 4
NUM_EXPLAINED = 8


class Cost:
    """Picks the pair of nodes, or the decode node alone, with the lowest cost."""

    def pick(self, query: RouteQuery, fleet: Fleet) -> Placement | None:
        search = _Search(query, fleet)
        places = search.places()
        if not places:
            return None
        # The first of equally cheap places wins. Only a few places are kept, because explanations
        # stay in memory for a while.
        shown = heapq.nsmallest(NUM_EXPLAINED, places, key=lambda place: place.cost_s)
        probe = find_probe(search.terms, shown[0])
        if probe is not None:
            shown = [probe, *shown[: NUM_EXPLAINED - 1]]
        best = shown[0]

        def explain() -> Sequence[Candidate]:
            return [place.candidate() for place in shown]

        decode = best.decode.node
        if best.prefill is None:
            num_cached = query.num_prompt_tokens - best.decode.num_missing
            return Placement(None, decode, num_cached, probe is not None, explain)
        num_cached = query.num_prompt_tokens - best.prefill.num_missing
        return Placement(best.prefill.node, decode, num_cached, probe is not None, explain)

    def explain(self, query: RouteQuery, fleet: Fleet) -> list[Candidate]:
        """Return every place for a request, best first; slow, so only for operators."""
        places = _Search(query, fleet).all_places()
        return [place.candidate() for place in sorted(places, key=lambda place: place.cost_s)]


class _Search:
    """The search for the best places of one request in a fleet.

    Attributes:
        terms: facts about the request that the costs of all places need.
    """

    def __init__(self, query: RouteQuery, fleet: Fleet) -> None:
        self._fleet = fleet
        self.terms = CostTerms.of(query, fleet)
        self._prefill_costs_s = prefill_costs(self.terms)
        slowest_s = max(self._prefill_costs_s, default=0.0)
        self._decode_costs_s = decode_costs(
            self.terms, fleet.decodes, fleet.decode_places, slowest_s
        )

    def places(self) -> list[Place]:
        """Return the places that were considered, which include the best one.

        A pair costs at least the sum of its nodes' own costs and the link's latency. Pairs for
        which this bound is not well below the lowest cost so far are skipped.
        """
        places: list[Place] = []
        best_s = float("inf")
        for floor_s, i, j in self._pairs_best_first():
            if floor_s >= best_s - CLOSE_ENOUGH_S:
                break
            places.append(self._pair(i, j, floor_s))
            best_s = min(best_s, places[-1].cost_s)
        if self._fleet.self_prefilling:
            places += self._locals(best_s)
        return places

    def all_places(self) -> list[Place]:
        """Return the places of all pairs, and of all decode nodes that may work alone."""
        fleet, terms = self._fleet, self.terms
        pairs = [
            pair_place(terms, prefill_terms(terms, prefill), decode_terms(terms, decode))
            for prefill in fleet.prefills
            for decode in fleet.reached_by(prefill)
        ]
        best_s = min((place.cost_s for place in pairs), default=float("inf"))
        alone = (decode_terms(terms, node, is_alone=True) for node in fleet.self_prefilling)
        places = [local_place(terms, decode, best_s) for decode in alone]
        return pairs + self._harmless(places, best_s)

    # ------------------------------------------------------------------ pairs

    def _pairs_best_first(self) -> Iterator[tuple[float, int, int]]:
        """Yield connected pairs as (lower bound of the cost, prefill index, decode index).

        Pairs with the lowest bounds come first.
        """
        fleet = self._fleet
        if not fleet.prefills:
            return
        near_s = PREFILL_NEAR_S + PREFILL_NEAR * min(self._prefill_costs_s)
        prefills = _shortlist(self._prefill_costs_s, fleet.prefills, near_s)
        if not fleet.is_complete:
            yield from self._pairs_of_some(prefills)
            return
        decodes = _shortlist(self._decode_costs_s, fleet.decodes, DECODE_NEAR_S)
        heap = [(prefills[0][0] + decodes[0][0], 0, 0)]
        for _ in range(MAX_PAIRS):
            if not heap:
                return
            floor_s, i, j = heapq.heappop(heap)
            yield floor_s + LINK_LATENCY_S, prefills[i][-1], decodes[j][-1]
            if j + 1 < len(decodes):
                heapq.heappush(heap, (prefills[i][0] + decodes[j + 1][0], i, j + 1))
            if j == 0 and i + 1 < len(prefills):
                heapq.heappush(heap, (prefills[i + 1][0] + decodes[0][0], i + 1, 0))

    def _pairs_of_some(
        self, prefills: list[tuple[float, int, int]]
    ) -> Iterator[tuple[float, int, int]]:
        """Yield as `_pairs_best_first` does, for a fleet in which some nodes are not connected."""
        fleet, costs_s = self._fleet, self._decode_costs_s
        pairs: list[tuple[float, int, int, int]] = []
        for cost_s, _, i in prefills:
            reached = fleet.reached_by(fleet.prefills[i])
            own_costs_s = [costs_s[fleet.decode_places[decode.engine_id]] for decode in reached]
            for decode_s, _, j in _shortlist(own_costs_s, reached, DECODE_NEAR_S)[:4]:
                place = fleet.decode_places[reached[j].engine_id]
                pairs.append((cost_s + decode_s + LINK_LATENCY_S, len(pairs), i, place))
        for floor_s, _, i, j in sorted(pairs):
            yield floor_s, i, j

    def _pair(self, i: int, j: int, floor_s: float) -> Place:
        """Make the place of a pair of nodes.

        Args:
            floor_s: replaces the sum of the nodes' own costs in the pair's cost.
        """
        fleet, terms = self._fleet, self.terms
        place = pair_place(
            terms, prefill_terms(terms, fleet.prefills[i]), decode_terms(terms, fleet.decodes[j])
        )
        own_s = self._prefill_costs_s[i] + self._decode_costs_s[j] + LINK_LATENCY_S
        place.cost_s -= own_s - floor_s  # so that nearly equal nodes have equal costs
        return place

    # ------------------------------------------------------------------ local on D

    def _locals(self, best_pair_s: float) -> list[Place]:
        """Return places of decode nodes alone: the cheapest, and those with the longest hits."""
        fleet, terms = self._fleet, self.terms
        costs_s = self._decode_costs_s
        # Some of these nodes are connected to no prefill node, or others compute no prompts
        if fleet.decodes != fleet.self_prefilling:
            costs_s = decode_costs(
                terms, fleet.self_prefilling, fleet.self_prefilling_places, float("inf")
            )
        chosen = _shortlist(costs_s, fleet.self_prefilling, DECODE_NEAR_S)[:MAX_HITS]
        places = {i for _, _, i in chosen}
        all_places = fleet.self_prefilling_places
        hits = [
            (num_cached, -all_places[engine_id])
            for engine_id, num_cached in terms.cached_alone.items()
            if engine_id in all_places
        ]
        places.update(-place for _, place in heapq.nlargest(MAX_HITS, hits))
        nodes = (fleet.self_prefilling[i] for i in sorted(places))
        alone = (decode_terms(terms, node, is_alone=True) for node in nodes)
        some = [local_place(terms, one, best_pair_s) for one in alone]
        return self._harmless(some, best_pair_s)

    def _harmless(self, places: list[Place], best_pair_s: float) -> list[Place]:
        """Leave out places without a prefill node that would win but make a request late.

        If the request's tenant must leave room to others, decode nodes with queued prompts are left
        out, too: the request was admitted because prefill nodes have room, and on such a decode
        node, other tenants' prompts would wait behind it.
        """
        if best_pair_s == float("inf"):
            return places
        if self.terms.leaves_room:
            places = [place for place in places if not place.decode.stall_s]
        return [
            place
            for place in places
            if place.cost_s >= best_pair_s or keeps_deadlines(self.terms, place)
        ]


def _shortlist(
    costs_s: Sequence[float], nodes: Sequence[NodeLoad], near_s: float
) -> list[tuple[float, int, int]]:
    """Return (cost, tokens placed on the node, index) of the best nodes, best first.

    A cost near the lowest cost is replaced by the lowest cost.
    """
    best_s = min(costs_s)
    near_s += best_s
    limit_s = float("inf")
    if len(costs_s) > MAX_NODES:
        limit_s = max(near_s, heapq.nsmallest(MAX_NODES, costs_s)[-1])
    chosen = [
        (best_s if cost_s <= near_s else cost_s, nodes[i].num_placed_tokens, i)
        for i, cost_s in enumerate(costs_s)
        if cost_s <= limit_s
    ]
    chosen.sort()
    return chosen[:MAX_NODES]
