"""Capacity: how much work all nodes together can take now, and when they can take more.

The estimate comes from the nodes' load and speed (`NodeLoad`). `Capacity` sees requests only as
token counts, and does not know which node a request will get.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from router.fleet.fleet import Fleet
from router.fleet.load.node_load import NodeLoad
from router.gate.admission_options import PREFILL_WINDOW_S, SHARED_PREFILL_WINDOW_S

# Share of each decode node's KV cache that is kept free for growing outputs. Twice this share is
# kept free when a request must leave room for other tenants.
_KV_HEADROOM = 0.05
_BIAS_LIMITS = (0.25, 4.0)
# Underestimated waits change the bias more than overestimated waits, because deadlines matter.
_BIAS_UP, _BIAS_DOWN = 0.1, 0.02
_LEAST_WAIT_S = 0.5  # waits shorter than this many seconds do not show how good an estimate is


class Capacity:
    """Estimate the capacity of one base model's nodes.

    Args:
        fleet: returns the nodes that may get requests now.
        prefill_window_s: seconds of work that may be queued on a prefill node.
        shared_prefill_window_s: smaller limit for a tenant that must leave room to others; the
            finished part of a prompt does not count.
        clock: the clock of the nodes' loads.
        prompt_fleet: returns the nodes for pooled prompts, which need no decode node; None:
            ``fleet``.

    Attributes:
        bias: factor by which recent waits exceeded their estimates.
    """

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        prefill_window_s: float = PREFILL_WINDOW_S,
        *,
        shared_prefill_window_s: float = SHARED_PREFILL_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
        prompt_fleet: Callable[[], Fleet] | None = None,
    ) -> None:
        self._fleet = fleet
        self._prompt_fleet = prompt_fleet or fleet
        self._prefill_window_s = prefill_window_s
        self._shared_prefill_window_s = min(shared_prefill_window_s, prefill_window_s)
        self._clock = clock
        self.bias = 1.0

    def has_room(self, num_prompt_tokens: int, max_tokens: int, *, shares: bool = False) -> bool:
        """Return whether some pair can take a request now; also True if no pair exists.

        Args:
            shares: whether to leave room to other tenants, so that their next request need not
                wait: then queue only enough work to keep prefill nodes busy, and keep some KV free.
        """
        fleet = self._fleet()
        if not fleet:
            return True
        if not self._has_time(fleet.prefills or fleet.self_prefilling, shares=shares):
            return False
        needed = self.kv_tokens(num_prompt_tokens, max_tokens)
        headroom = 2 * _KV_HEADROOM if shares else _KV_HEADROOM
        return any(_has_kv_room(node, needed, headroom) for node in _receivers(fleet))

    def has_time(self, *, shares: bool = False) -> bool:
        """Return whether a prefill node can take a pooled prompt, which needs no decode node, now.

        True if no such node exists.

        Args:
            shares: see `has_room`.
        """
        prefills = self._prompt_fleet().prefills
        return not prefills or self._has_time(prefills, shares=shares)

    def _has_time(self, prefills: Sequence[NodeLoad], *, shares: bool) -> bool:
        if shares:
            now, window_s = self._clock(), self._shared_prefill_window_s
            return any(_left_s(node, now) <= window_s for node in prefills)
        return any(node.prefill_queue_s <= self._prefill_window_s for node in prefills)

    def kv_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the KV tokens that a request will hold, assuming an average output."""
        decodes = _receivers(self._fleet())
        if not decodes:
            return num_prompt_tokens
        return num_prompt_tokens + int(min(max_tokens, decodes[0].shared.output_tokens))

    def prefill_s(self, num_prompt_tokens: int) -> float:
        """Return the seconds from a prefill node's begin of a prompt to the first token."""
        fleet = self._fleet()
        prefills = fleet.prefills or fleet.self_prefilling
        base, per_token = _mean_line(prefills) if prefills else (0.0, 0.0)
        return base + per_token * num_prompt_tokens

    def wait_s(
        self, num_requests: float, num_prompt_tokens: float, num_kv_tokens: float, *, last: int = 0
    ) -> float:
        """Return the seconds until more requests, given as sums, have their first tokens.

        Args:
            last: prompt tokens of one more request behind the others, whose wait is included; one
                node computes its whole prompt.
        """
        fleet = self._fleet()
        prefills, decodes = fleet.prefills or fleet.self_prefilling, _receivers(fleet)
        if not prefills or not decodes:
            return 0.0
        base, per_token = _mean_line(prefills)
        work_s = num_requests * base + num_prompt_tokens * per_token
        prefill_s = _level([node.prefill_queue_s for node in prefills], work_s)
        room = sum(_room(node) for node in decodes)
        num_free = sum(node.num_free_tokens for node in decodes) - room * _KV_HEADROOM
        num_held = max(room - num_free, 1.0)
        # On average, a decode node frees all its KV once per mean residence time.
        room_s = (num_kv_tokens - num_free) * decodes[0].shared.residence_s / num_held
        last_s = base + per_token * last if last else 0.0
        return self.bias * (max(prefill_s, room_s, 0.0) + last_s)

    def decode_s(self, max_tokens: int) -> float:
        """Return the seconds from the first to the last token of a long output."""
        decodes = _receivers(self._fleet())
        if not decodes:
            return 0.0
        lately = decodes[0].shared
        num_tokens = min(max_tokens, lately.long_output_tokens)
        # An output occupies the node from its second token, for which it may wait a step, to its
        # last.
        return (num_tokens + 1) * lately.residence_s / max(lately.output_tokens - 2, 1.0)

    def note_wait(self, estimated_s: float, actual_s: float) -> None:
        """Correct the bias by a request's actual wait; the estimate must be without bias."""
        if estimated_s < _LEAST_WAIT_S:
            return
        low, high = _BIAS_LIMITS
        error = min(max(actual_s / estimated_s, low), high) - self.bias
        self.bias += (_BIAS_UP if error > 0 else _BIAS_DOWN) * error


def _level(queues_s: list[float], work_s: float) -> float:
    """Return the time when all queues are empty if new work always goes to the shortest queue.

    Nodes with queues longer than the result get no new work and do not count, because a node
    may report an arbitrarily long queue.
    """
    while True:
        level = (sum(queues_s) + work_s) / len(queues_s)
        lower = [queue_s for queue_s in queues_s if queue_s <= level]
        if not lower or len(lower) == len(queues_s):
            return level
        queues_s = lower


def _mean_line(prefills: Sequence[NodeLoad]) -> tuple[float, float]:
    """Return the mean seconds per prompt and per token of a prefill node."""
    base = sum(node.prefill.base for node in prefills) / len(prefills)
    return base, sum(node.prefill.per_unit for node in prefills) / len(prefills)


def _receivers(fleet: Fleet) -> Sequence[NodeLoad]:
    """Return the decode nodes of pairs, or the nodes that prefill themselves if no pair exists."""
    return fleet.decodes or fleet.self_prefilling


def _room(node: NodeLoad) -> int:
    return node.num_blocks * node.block_size


def _left_s(node: NodeLoad, now: float) -> float:
    """Return the seconds until a prefill node is idle, without its first prompt's done part."""
    begun_s = max(now - node.prefill_progress_at, 0.0)
    return node.prefill_queue_s - min(begun_s, node.prefill_front_s)


def _has_kv_room(node: NodeLoad, num_tokens: int, headroom: float) -> bool:
    if not node.num_batch:  # the node holds nothing, so it cannot free memory
        return True
    return node.num_free_tokens - headroom * _room(node) >= num_tokens
