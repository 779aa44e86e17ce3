"""Terms of `Cost`: a request's seconds on a node, between two nodes, and on a decode node alone.

The functions turn nodes' values into costs; they choose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.limits import NUM_LAYER_GROUPS
from router.fleet.fleet import Fleet
from router.fleet.load.node_load import DEFAULT_CHUNK_TOKENS, REQUEST_UNITS, NodeLoad
from router.fleet.load.prompt_units import units_until
from router.policies.base import Candidate, RouteQuery

# Seconds from the last byte of KV that is sent until the KV can be used: the time of one message.
LINK_LATENCY_S = 0.001
DEFAULT_BYTES_PER_S = 10e9
# Weight of a second of slower decoding, which counts less than a second before token 1, because it
# is spread over many tokens.
DECODE_WEIGHT = 0.5
# A prompt delays all prompts that arrive before its node is idle again. If q prompts are queued,
# about q more arrive until this prompt is done (Little's law, random arrivals). These delay further
# prompts, so q / (1 - utilization) prompts are delayed in all. Assumes a utilization of one half.
BUSY_FACTOR = 2.0
# A prompt on D delays all requests that decode there; D bounds each single step
# (`--max-step-stretch`). The weight of the delay depends on the share of an average answer's time
# that prompts on D take: from this share on, each second of delay counts as a second; below it, the
# weight falls with the square of the share. So a few short prompts cost little, and a long prompt
# or many prompts cost as much as a standstill.
WHOLE_HARM_SHARE = 0.2
# Computing a prompt on the decode node must be cheaper by this margin, because the next prompt has
# to wait. If the decode node is idle, the margin shrinks with the share of the prompt that must be
# computed: a conversation with a short new part stays where its KV is, and no prefill node computes
# that KV again.
LOCAL_MARGIN_S, LOCAL_MARGIN = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Facts about a request that the costs of all places need.

    Attributes:
        cached: number of prompt tokens that each node has in its cache, or can fetch if it is a
            prefill node, by engine id.
        cached_alone: as ``cached``, but with the tokens that a decode node can fetch if it computes
            the prompt itself.
        num_steps: expected number of decode steps.
        most_steps: number of decode steps that few requests exceed.
        timeout_s: seconds until the request's deadline.
        leaves_room: whether to avoid decode nodes with queued prompts.
        num_behind: expected number of prompts that this one delays on any prefill node; see
            `BUSY_FACTOR`.
        kv_bytes_per_token: bytes of KV per token over all layers; 0: unknown.
        least_chunk_tokens: smallest `NodeLoad.chunk_tokens` of all prefill nodes.
        adapter_load_s: seconds that each node without the request's adapter needs to load it, by
            engine id.
    """

    fleet: Fleet
    num_tokens: int
    num_steps: float
    most_steps: float
    timeout_s: float
    cached: Mapping[str, int]
    now: float
    kv_bytes_per_token: float
    best_bytes_per_s: float
    leaves_room: bool = False
    num_behind: float = 0.0
    least_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    cached_alone: Mapping[str, int] = field(default_factory=dict)
    adapter_load_s: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(query: RouteQuery, fleet: Fleet) -> CostTerms:
        decodes = fleet.decodes or fleet.self_prefilling
        output_tokens = decodes[0].shared.output_tokens if decodes else 0.0
        long_output_tokens = decodes[0].shared.long_output_tokens if decodes else 0.0
        cached = query.find_cached_tokens()
        return CostTerms(
            fleet=fleet,
            num_tokens=query.num_prompt_tokens,
            num_steps=min(query.max_tokens, output_tokens),
            most_steps=min(query.max_tokens, long_output_tokens),
            timeout_s=query.timeout_s,
            cached=cached,
            cached_alone=query.find_cached_alone() if query.find_cached_alone else cached,
            now=query.now,
            leaves_room=query.leaves_room,
            adapter_load_s=query.adapter_load_s,
            kv_bytes_per_token=decodes[0].shared.kv_bytes_per_token if decodes else 0.0,
            best_bytes_per_s=fleet.best_bandwidth or DEFAULT_BYTES_PER_S,
            least_chunk_tokens=fleet.least_chunk_tokens,
            num_behind=(
                BUSY_FACTOR * sum([node.num_uncomputed_requests for node in fleet.prefills])
                + query.num_waiting
            )
            / max(len(fleet.prefills), 1),
        )

    def num_missing(self, node: NodeLoad, *, is_alone: bool = False) -> int:
        """Return how many prompt tokens a node must compute: at least the last, for sampling."""
        cached = self.cached_alone if is_alone else self.cached
        if not cached:
            return self.num_tokens
        return max(self.num_tokens - cached.get(node.engine_id, 0), 1)

    def prompt_units(self, node: NodeLoad, num_missing: int) -> float:
        """Return the units of the prompt's last tokens on a node."""
        return node.prompt_units(num_missing, self.num_tokens - num_missing)

    def load_s(self, node: NodeLoad) -> float:
        """Return the seconds that a node needs to load the request's adapter; 0 if it is loaded."""
        return self.adapter_load_s.get(node.engine_id, 0.0)

    def tail_s(self, num_missing: int, chunk_tokens: int, bytes_per_s: float) -> float:
        """Return the seconds to send the last chunk's last layer group, after all is computed.

        All other KV is sent while the prefill node computes.
        """
        num_bytes = min(num_missing, chunk_tokens) * self.kv_bytes_per_token
        return num_bytes / NUM_LAYER_GROUPS / bytes_per_s


@dataclass(slots=True)
class PrefillTerms:
    """A request's costs on a prefill node, in seconds.

    Attributes:
        num_missing: number of prompt tokens that the node must compute.
        wait_s: wait until the node begins to compute the prompt.
        compute_s: time to compute the prompt.
        damage_s: sum of the delays of all prompts that will wait for this one.
        total_s: time until the prompt is computed, increased for a node with a low weight.
        is_measured: whether the node's speed was measured.
    """

    node: NodeLoad
    num_missing: int
    wait_s: float
    compute_s: float
    damage_s: float
    total_s: float
    is_measured: bool


@dataclass(slots=True)
class DecodeTerms:
    """A request's costs on a decode node, in seconds.

    Attributes:
        room_s: wait until the node has room for the prompt's KV.
        stall_s: time to compute the prompts queued on the node.
        steps_s: time of the request's decode steps, times `DECODE_WEIGHT`.
        damage_s: delay of all other requests together, times `DECODE_WEIGHT`.
    """

    node: NodeLoad
    num_missing: int
    room_s: float
    stall_s: float
    steps_s: float
    damage_s: float
    is_measured: bool


@dataclass(slots=True)
class Place:
    """A pair of nodes, or a decode node alone, with its cost and the parts of the cost by name."""

    cost_s: float
    prefill: PrefillTerms | None
    decode: DecodeTerms
    terms_s: dict[str, float]

    def candidate(self) -> Candidate:
        """Return the place in the form for operators, with costs in milliseconds."""
        terms = {name: 1e3 * seconds for name, seconds in self.terms_s.items()}
        prefill = self.prefill.node.node_name if self.prefill else ""
        decode = self.decode.node.node_name
        assumed = [prefill] if self.prefill and not self.prefill.is_measured else []
        assumed += [] if self.decode.is_measured else [decode]
        num_missing = (self.prefill or self.decode).num_missing
        return Candidate(prefill, decode, 1e3 * self.cost_s, terms, tuple(assumed), num_missing)


# ---------------------------------------------------------------- all nodes, computed fast


def prefill_costs(terms: CostTerms) -> list[float]:
    """Return each prefill node's cost in seconds: its queue, this prompt, and others' delays.

    The formula is that of `prefill_terms`, for all nodes at once.
    """
    nodes = terms.fleet.prefills
    now, num_tokens = terms.now, terms.num_tokens
    num_behind, num_pairs = terms.num_behind, 0.5 * num_tokens * num_tokens
    costs_s = [
        node.prefill_base_s
        + num_behind * (line := node.prefill).base
        + (node.prefill_s_per_unit + num_behind * line.per_unit)
        * (num_tokens + node.attention_share * num_pairs)  # `prompt_units`
        - (
            0.0
            if (begun_s := now - node.prefill_progress_at) <= 0
            else begun_s
            if begun_s < node.prefill_front_s
            else node.prefill_front_s
        )
        for node in nodes
    ]
    places = terms.fleet.prefill_places
    for engine_id, num_cached in terms.cached.items():
        place = places.get(engine_id)
        if place is not None:
            num_saved = num_cached if num_cached < num_tokens else num_tokens - 1
            node = nodes[place]
            s_per_unit = node.prefill_s_per_unit + num_behind * node.prefill.per_unit
            costs_s[place] -= s_per_unit * units_until(node.attention_share, num_saved)
    _add_loads(terms, costs_s, places)
    return costs_s


def decode_costs(
    terms: CostTerms, nodes: Sequence[NodeLoad], places: Mapping[str, int], slowest_s: float
) -> list[float]:
    """Return each decode node's least contribution to the cost of a pair, in seconds.

    Args:
        places: index of each node in ``nodes``, by engine id.
        slowest_s: longest time of any prefill; a wait for KV room costs nothing until then.
    """
    num_steps, units = DECODE_WEIGHT * terms.num_steps, REQUEST_UNITS + terms.num_tokens
    num_tokens, chunk_tokens = terms.num_tokens, terms.least_chunk_tokens
    tail_s = terms.tail_s(num_tokens, chunk_tokens, terms.best_bytes_per_s)
    costs_s = [
        num_steps * (node.step_base_s + node.step_s_per_unit * units)
        + node.prefill_queue_s
        + tail_s
        + (
            0.0
            if num_tokens <= node.num_room_tokens
            else max(room_wait_s(node, num_tokens) - slowest_s, 0.0)
        )
        for node in nodes
    ]
    for engine_id, num_cached in terms.cached.items():
        if num_tokens - num_cached >= chunk_tokens:
            continue  # the last chunk is computed elsewhere and sent in full in any case
        place = places.get(engine_id)
        if place is not None:
            num_missing = max(num_tokens - num_cached, 1)
            own_tail_s = terms.tail_s(num_missing, chunk_tokens, terms.best_bytes_per_s)
            costs_s[place] += own_tail_s - tail_s
    _add_loads(terms, costs_s, places)
    return costs_s


def _add_loads(terms: CostTerms, costs_s: list[float], places: Mapping[str, int]) -> None:
    """Add half of the time to load the adapter to the cost of each node without it.

    Both nodes of a pair load at the same time, so the pair waits for the slower node: at least half
    of the sum.
    """
    for engine_id, load_s in terms.adapter_load_s.items():
        place = places.get(engine_id)
        if place is not None:
            costs_s[place] += load_s / 2


# ---------------------------------------------------------------- one node, one place


def prefill_terms(terms: CostTerms, node: NodeLoad) -> PrefillTerms:
    """Return what a request costs on one prefill node."""
    num_missing = terms.num_missing(node)
    units = terms.prompt_units(node, num_missing)
    compute_s = node.prefill.seconds(units)
    begun_s = min(max(terms.now - node.prefill_progress_at, 0.0), node.prefill_front_s)
    total_s = node.prefill_base_s + node.prefill_s_per_unit * units - begun_s
    # The delay includes the fixed time of a prompt (``base``), because measurements show that this
    # predicts better.
    damage_s = terms.num_behind * compute_s
    is_measured = node.prefill.is_known
    wait_s = total_s - compute_s
    return PrefillTerms(node, num_missing, wait_s, compute_s, damage_s, total_s, is_measured)


def decode_terms(terms: CostTerms, node: NodeLoad, *, is_alone: bool = False) -> DecodeTerms:
    """Return the terms of a request's cost on one decode node.

    Args:
        is_alone: whether the node computes the prompt itself.
    """
    num_steps, units = DECODE_WEIGHT * terms.num_steps, REQUEST_UNITS + terms.num_tokens
    more_s = node.step.per_unit * units
    return DecodeTerms(
        node,
        terms.num_missing(node, is_alone=is_alone),
        room_s=room_wait_s(node, terms.num_tokens),
        stall_s=node.prefill_queue_s,
        steps_s=num_steps * (node.step_base_s + more_s),
        damage_s=num_steps * (node.step_s_per_unit * units - more_s),
        is_measured=node.step.is_known,
    )


def pair_place(terms: CostTerms, prefill: PrefillTerms, decode: DecodeTerms) -> Place:
    """Return the place of a pair: the prefill node computes the prompt, the decode node decodes."""
    bytes_per_s = terms.fleet.bandwidth(prefill.node, decode.node) or DEFAULT_BYTES_PER_S
    s_per_token = terms.kv_bytes_per_token / bytes_per_s
    # KV is sent while the prefill node computes, so only the time beyond counts. The KV of prompts
    # that were queued before this one is sent first. This prompt's KV is made once these prompts
    # are computed, and D receives the KV once D has room.
    sent_s = (prefill.node.num_open_tokens + decode.num_missing) * s_per_token
    begins_s = max(prefill.wait_s, decode.room_s)
    arrived_s = max(sent_s, begins_s + decode.num_missing * s_per_token)
    tail_s = terms.tail_s(decode.num_missing, prefill.node.chunk_tokens, bytes_per_s)
    exposed_s = LINK_LATENCY_S + max(tail_s, arrived_s - prefill.total_s)
    terms_s = {
        "prefill_queue_ms": prefill.wait_s,
        "prefill_ms": prefill.compute_s,
        "prefill_damage_ms": prefill.damage_s,
        "exposed_transfer_ms": exposed_s,
        "stall_ms": decode.stall_s,
        "decode_ms": decode.steps_s,
        "damage_ms": decode.damage_s,
    }
    if terms.adapter_load_s:
        terms_s["adapter_load_ms"] = max(terms.load_s(prefill.node), terms.load_s(decode.node))
    return Place(sum(terms_s.values()), prefill, decode, terms_s)


def local_place(terms: CostTerms, decode: DecodeTerms, best_pair_s: float) -> Place:
    """Return the place of a decode node alone, which computes the prompt between decode steps.

    Each other request waits while the node computes a chunk of the prompt, and the prompt waits for
    the other requests' decode steps.

    Args:
        best_pair_s: cost of the best pair; inf: there is no pair, so no margin is needed.
    """
    node = decode.node
    units = terms.prompt_units(node, decode.num_missing)
    compute_s = node.prefill.seconds(units) / node.weight
    factor = node.beside_factor if node.num_batch else 1.0
    wait_s = max(factor * decode.stall_s, decode.room_s)
    delay_s = node.delay_s(units)
    share = node.prompt_share(terms.now, delay_s)
    harm = min(share / WHOLE_HARM_SHARE, 1.0) ** 2
    terms_s = {
        "local_queue_ms": wait_s,
        "prefill_ms": compute_s,
        "beside_ms": (factor - 1) * compute_s,
        "stall_ms": harm * delay_s * node.num_batch,
        "decode_ms": decode.steps_s,
        "damage_ms": decode.damage_s,
    }
    if terms.adapter_load_s:
        terms_s["adapter_load_ms"] = terms.load_s(node)
    if best_pair_s < float("inf"):
        share = 1.0 if node.num_batch else decode.num_missing / max(terms.num_tokens, 1)
        terms_s["margin_ms"] = share * (LOCAL_MARGIN_S + LOCAL_MARGIN * (wait_s + compute_s))
    return Place(sum(terms_s.values()), None, decode, terms_s)


def keeps_deadlines(terms: CostTerms, place: Place) -> bool:
    """Return whether all requests on a decode node keep their deadlines if it computes the prompt.

    Takes time proportional to the requests on the node, so do not call this for every node.
    """
    compute_s, node = place.terms_s["prefill_ms"], place.decode.node
    own_terms = ("local_queue_ms", "adapter_load_ms", "prefill_ms", "beside_ms")
    own_s = sum(place.terms_s.get(name, 0.0) for name in own_terms)
    needed_s = own_s + terms.most_steps * node.step_base_s
    return needed_s <= terms.timeout_s and compute_s <= node.slack_s(terms.now)


def room_wait_s(node: NodeLoad, num_tokens: int) -> float:
    """Return the seconds until a decode node has KV room for a prompt and a place in its batch.

    By Little's law, all present requests leave within the mean time that a request decodes.
    """
    if num_tokens <= node.num_room_tokens:
        return 0.0
    residence_s, beat, wait_s = node.shared.residence_s, node.beat, 0.0
    num_lacking = num_tokens + node.block_size - node.num_free_tokens
    if num_lacking > 0:
        num_held = max(node.num_blocks * node.block_size - node.num_free_tokens, 1)
        wait_s = residence_s * num_lacking / num_held
    if node.num_waiting_for_room:  # KV has arrived, and waits for a place in the batch
        ahead = (node.num_waiting_for_room + 1) / max(beat.num_running, 1)
        wait_s = max(wait_s, residence_s * ahead)
    return wait_s
