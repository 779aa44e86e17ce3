"""ScalingSignals: how busy the nodes of each role are, for who decides how many there are to be.

    prefill   the busiest node: the share of time in which it has prompts to compute, or the time
              that its next prompt would wait, of what the first token may take
    decode    the busiest node: its KV in use, or its next step, of what a token may take

The busiest, and not the mean: requests wait for it. What is said of nodes is their own account, of
all routers' requests together, so that every router says about the same, and one that is missing
changes nothing. Decides nothing.
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
MOST = 4.0  # a pressure above it says no more


@dataclass(frozen=True, slots=True)
class ScalingSignal:
    """Of one role, as of now.

    Attributes:
        pressure: of the busiest node; 1 is as busy as one may be. At most `MOST`.
        num_nodes: that are here, or were until lately.
        demand: nodes' worth of work: divided by the pressure that is wanted, the nodes to have.
    """

    pressure: float
    num_nodes: int

    @property
    def demand(self) -> float:
        return self.pressure * self.num_nodes


class ScalingSignals:
    """Of one router.

    Args:
        queue_s: until requests that wait at the router have their turn.
        clock: seconds that never go back.
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
        self._busy: dict[str, float] = {}  # by engine id: the share of time, lately
        self._ticked_at = clock()

    def tick(self) -> None:
        """Look at who has work; to be called about once per beat interval."""
        now = self._clock()
        elapsed_s = min(max(now - self._ticked_at, 0.0), 10 * BEAT_INTERVAL_S)
        self._ticked_at = now
        part = elapsed_s / (SMOOTHING_S + elapsed_s)
        busy = {}
        for node in self._pool.nodes:
            if node.registration.role is NodeRole.PREFILL:
                before = self._busy.get(node.engine_id, 0.0)
                busy[node.engine_id] = before + part * (_has_prompts(node.load) - before)
        self._busy = busy  # of who left nothing stays

    def signal(self, role: NodeRole) -> ScalingSignal | None:
        """None: there is no node that could say it, and silence is no sign of idleness."""
        nodes = [node for node in self._pool.nodes if node.registration.role is role]
        serving = [node for node in nodes if self._pool.is_eligible(node)]
        num_lost = sum(lost.role is role for lost in self._pool.lost)
        if not serving:
            return None
        of_role = self._of_prefill if role is NodeRole.PREFILL else self._of_decode
        return ScalingSignal(min(of_role(serving), MOST), len(serving) + num_lost)

    def _of_prefill(self, nodes: Sequence[Node]) -> float:
        busiest = max(self._busy.get(node.engine_id, 0.0) for node in nodes)
        # Where a prompt would wait least: one long queue beside idle nodes wants no other node.
        wait_s = min(node.load.prefill_queue_s for node in nodes) + self._queue_s()
        return max(busiest, wait_s / self._options.scaling_ttft_s)

    def _of_decode(self, nodes: Sequence[Node]) -> float:
        return max(self._of_decode_node(node.load) for node in nodes)

    def _of_decode_node(self, load: NodeLoad) -> float:
        if not load.has_beat:
            return 0.0
        in_use = 1 - load.beat.num_free_blocks / load.num_blocks
        if load.beat.num_waiting:  # more than there is room for
            in_use = max(in_use, 1.0) + load.beat.num_waiting / max(load.beat.num_running, 1)
        # (A step is only known of where something decodes.)
        step_s = load.step_base_s if load.num_batch and load.step.num_measured else 0.0
        return max(in_use, step_s / self._options.scaling_itl_s)


def _has_prompts(load: NodeLoad) -> bool:
    return bool(load.num_uncomputed_requests or load.beat.num_uncomputed_tokens)
