"""ScalingSignals: how busy each role's nodes are, for autoscalers.

    prefill   the larger of: the busiest node's share of time with prompts; the next prompt's wait
              divided by the target time to first token
    decode    the busiest node: the larger of its share of KV in use, and its step time divided by
              the target
    encode    the smallest number of images that wait on a node

Values come from the nodes' reports, which cover all routers' requests, so all routers give about
the same signals. `scaling` only informs: an autoscaler decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.link.beat_interval import BEAT_INTERVAL_S
from baton.link.words import NodeRole
from router.fleet.load.node_load import NodeLoad
from router.fleet.node import Node
from router.fleet.node_pool import NodePool
from router.gate.scaling_options import ScalingOptions

SMOOTHING_S = 20.0
MOST = 4.0  # a larger pressure is reported as this pressure


@dataclass(frozen=True, slots=True)
class ScalingSignal:
    """How busy the nodes of one role are.

    Attributes:
        pressure: how busy the busiest node is; 1 means that it is at its target. At most `MOST`.
        num_nodes: number of nodes that may get requests or were lost lately.
        demand: pressure times number of nodes. Divided by the pressure that an operator wants, this
            is the number of nodes needed.
    """

    pressure: float
    num_nodes: int

    @property
    def demand(self) -> float:
        return self.pressure * self.num_nodes


class ScalingSignals:
    """Computes the scaling signals of one base model's nodes.

    Args:
        queue_s: returns the expected seconds that a request waits at the gate.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        pool: NodePool,
        options: ScalingOptions | None = None,
        *,
        queue_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._options = options or ScalingOptions()
        self._queue_s = queue_s
        self._clock = clock
        # Smoothed share of time in which a prefill node has prompts, by engine id
        self._busy: dict[str, float] = {}
        self._ticked_at = clock()

    def tick(self) -> None:
        """Update how busy prefill nodes have been; call about once per beat interval."""
        now = self._clock()
        elapsed_s = min(max(now - self._ticked_at, 0.0), 10 * BEAT_INTERVAL_S)
        self._ticked_at = now
        part = elapsed_s / (SMOOTHING_S + elapsed_s)
        busy = {}
        for node in self._pool.members:
            if node.registration.role is NodeRole.PREFILL:
                before = self._busy.get(node.engine_id, 0.0)
                busy[node.engine_id] = before + part * (_has_prompts(node.load) - before)
        self._busy = busy  # nodes that left are dropped

    def signal(self, role: NodeRole) -> ScalingSignal | None:
        """Return a role's signal; None if no node of the role may get requests."""
        nodes = [node for node in self._pool.nodes if node.registration.role is role]
        serving = [node for node in nodes if self._pool.is_eligible(node)]
        num_lost = sum(lost.role is role for lost in self._pool.lost)
        if not serving:
            return None
        if role is NodeRole.ENCODE:  # the number of images that wait on the node with fewest
            waiting = [float(node.beat.num_waiting) for node in serving]
            return ScalingSignal(min(min(waiting), MOST), len(serving) + num_lost)
        of_role = self._of_prefill if role is NodeRole.PREFILL else self._of_decode
        return ScalingSignal(min(of_role(serving), MOST), len(serving) + num_lost)

    def _of_prefill(self, nodes: Sequence[Node]) -> float:
        busiest = max(self._busy.get(node.engine_id, 0.0) for node in nodes)
        # Use the shortest queue, because a long queue beside idle nodes needs no further nodes.
        wait_s = min(node.load.prefill_queue_s for node in nodes) + self._queue_s()
        return max(busiest, wait_s / self._options.scaling_ttft_s)

    def _of_decode(self, nodes: Sequence[Node]) -> float:
        return max(self._of_decode_node(node.load) for node in nodes)

    def _of_decode_node(self, load: NodeLoad) -> float:
        if not load.has_beat:
            return 0.0
        in_use = 1 - load.beat.num_free_blocks / load.num_blocks
        # Requests that were placed on the node wait for room in its cache
        if load.num_waiting_for_room:
            in_use = max(in_use, 1.0) + load.num_waiting_for_room / max(load.beat.num_running, 1)
        # A step time exists only while requests decode on the node.
        step_s = load.step_base_s if load.num_batch and load.step.num_measured else 0.0
        # Prompts that the node computes itself wait for earlier prompts, as on a prefill node.
        wait_s = load.prefill_queue_s
        return max(
            in_use, step_s / self._options.scaling_itl_s, wait_s / self._options.scaling_ttft_s
        )


def _has_prompts(load: NodeLoad) -> bool:
    has_prompts = load.num_uncomputed_requests or load.beat.num_uncomputed_tokens
    return bool(has_prompts) and not load.awaits_encodings
