"""Makes the traffic of `policies.py`: synthetic traces at a share of a fleet's capacity.

The capacity is the capacity of the busier role under two assumptions: the fleet computes each block
of a prompt only once, and decode nodes fill their batches up to the limit on the time per token. No
real fleet reaches this capacity, because several nodes must compute popular blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtest.load.generate import Lengths, Workload, gamma_arrivals, generate, on_off_arrivals
from loadtest.load.traces import BLOCK_TOKENS, TraceRequest
from sim_node.timing import TimingModel

TTFT_LIMIT_S, TPOT_LIMIT_S = 2.0, 0.04
KV_TOKENS = 26_000 * 16  # per node
NUM_CORRECTIONS = 4  # how often the rate is corrected for the work that the drawn sessions bring

# Yields the times at which sessions start, for a given rate.
Starts = Callable[[random.Random, float], Iterator[float]]


def poisson(chance: random.Random, rate_per_s: float) -> Iterator[float]:
    return gamma_arrivals(chance, rate_per_s=rate_per_s, variation=1.0)


def gamma_bursts(chance: random.Random, rate_per_s: float) -> Iterator[float]:
    return gamma_arrivals(chance, rate_per_s=rate_per_s, variation=3.0)


def on_off(chance: random.Random, rate_per_s: float) -> Iterator[float]:
    """Yield arrival times: twice the rate for about a second, then none for about a second."""
    return on_off_arrivals(chance, rate_per_s=2 * rate_per_s, mean_on_s=1.0, mean_off_s=1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Workloads with their shares of the sessions; ``groups_per_node``: groups of prefixes."""

    name: str
    workloads: tuple[tuple[float, Workload], ...]
    starts: Starts
    groups_per_node: int = 4


SHARED = Workload(
    num_groups=1,
    prefix_tokens=Lengths(6000, 0.4),
    turn_tokens=Lengths(1500, 0.8),
    output_tokens=Lengths(180, 0.7),
)
SESSIONS = Workload(
    turn_tokens=Lengths(3000, 0.8),
    output_tokens=Lengths(180, 0.7),
    mean_turns=4.0,
    mean_pause_s=3.0,
    max_input_length=60_000,
)
SINGLE = Workload(
    turn_tokens=Lengths(4000, 1.2), output_tokens=Lengths(180, 0.8), max_input_length=60_000
)
SHORT = Workload(turn_tokens=Lengths(400, 0.8), output_tokens=Lengths(250, 0.7))
AGENTS = Workload(
    num_groups=1,
    prefix_tokens=Lengths(5000, 0.4),
    turn_tokens=Lengths(900, 1.0),
    output_tokens=Lengths(150, 0.9),
    mean_turns=4.0,
    mean_pause_s=3.0,
    max_input_length=60_000,
)
TRAFFIC = (
    Traffic("shared prefix", ((1.0, SHARED),), poisson),
    Traffic("multi-turn", ((1.0, SESSIONS),), poisson),
    Traffic("bursty", ((1.0, SINGLE),), on_off),
    Traffic("mixed", ((0.3, AGENTS), (0.3, SESSIONS), (0.2, SINGLE), (0.2, SHORT)), gamma_bursts),
)


def make_trace(
    traffic: Traffic, num_nodes: int, num_requests: int, load: float, timing: TimingModel, seed: int
) -> list[TraceRequest]:
    """Make about ``num_requests`` requests, at ``load`` times the fleet's capacity.

    The fleet has ``num_nodes`` nodes per role. The trace ends when the last session starts, and the
    load is that of the measured part of the trace.
    """
    num_sessions, rate_per_s = num_requests, float(num_nodes)
    for _ in range(NUM_CORRECTIONS):
        trace = _generate(traffic, num_nodes, num_sessions, rate_per_s, seed)
        num_sessions = round(num_sessions * num_requests / len(trace))
        rate_per_s *= load / load_of(trace, num_nodes, timing)
    return _generate(traffic, num_nodes, num_sessions, rate_per_s, seed)


def num_unmeasured(num_requests: int) -> int:
    """Return how many requests at the beginning are not measured, as caches are still empty."""
    return num_requests // 5


def load_of(trace: list[TraceRequest], num_nodes: int, timing: TimingModel) -> float:
    """Return the load of the busier role, from the first measured request to the end."""
    first = num_unmeasured(len(trace))
    measured_s = (trace[-1].timestamp_ms - trace[first].timestamp_ms) / 1000
    work_s = max(sum(prefill_work_s(trace, timing)[first:]), decode_work_s(trace[first:], timing))
    return work_s / num_nodes / measured_s


def prefill_work_s(trace: list[TraceRequest], timing: TimingModel) -> list[float]:
    """Return a prefill node's seconds for each request, if each block is computed only once."""
    known: set[int] = set()
    work_s = []
    for request in trace:
        num_cached = BLOCK_TOKENS * next(
            (i for i, block in enumerate(request.hash_ids) if block not in known),
            len(request.hash_ids),
        )
        known.update(request.hash_ids)
        num_new = max(request.input_length - num_cached, 1)
        num_pairs = num_new * num_cached + num_new * num_new // 2
        work_s.append(timing.prefill_s(num_new, num_pairs))
    return work_s


def decode_work_s(trace: list[TraceRequest], timing: TimingModel) -> float:
    """Return the seconds that one decode node needs for the outputs of a trace.

    Batches are as large as the node's memory and the limit on the time per token allow.
    """
    num_outputs = sum(request.output_length for request in trace)
    num_kv_steps = sum(
        (request.input_length + request.output_length / 2) * request.output_length
        for request in trace
    )
    context = num_kv_steps / num_outputs  # mean number of a request's tokens in KV during a step
    per_request_s = timing.decode_s_per_request + context * timing.decode_s_per_kv_token
    batch = min((TPOT_LIMIT_S - timing.decode_step_s) / per_request_s, KV_TOKENS / context)
    return num_outputs * (timing.decode_step_s + batch * per_request_s) / batch


def _generate(
    traffic: Traffic, num_nodes: int, num_sessions: int, rate_per_s: float, seed: int
) -> list[TraceRequest]:
    """Draw the sessions of all workloads; no two workloads share block ids."""
    starts_s = itertools.islice(
        traffic.starts(random.Random(f"starts {seed}"), rate_per_s), num_sessions
    )
    chance = random.Random(f"shares {seed}")
    shares = [share for share, _ in traffic.workloads]
    of_workload: list[list[float]] = [[] for _ in shares]
    for start_s in starts_s:
        chance.choices(of_workload, shares)[0].append(start_s)
    requests: list[TraceRequest] = []
    for index, (_, workload) in enumerate(traffic.workloads):
        if workload.num_groups:
            num_groups = traffic.groups_per_node * num_nodes
            workload = dataclasses.replace(workload, num_groups=num_groups)
        starts = of_workload[index]
        some = generate(workload, iter(starts), num_sessions=len(starts), seed=seed)
        requests += (_shifted(request, index * 10**9) for request in some)
    last_ms = 1000 * max(starts[-1] for starts in of_workload if starts)
    requests = [request for request in requests if request.timestamp_ms <= last_ms]
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _shifted(request: TraceRequest, by: int) -> TraceRequest:
    hash_ids = tuple(hash_id + by for hash_id in request.hash_ids)
    return dataclasses.replace(request, hash_ids=hash_ids, session=request.session + by)
