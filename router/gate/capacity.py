"""Capacity: how much work all nodes together can take now, and when they can take more.

The estimates come from the nodes' loads and speeds (`NodeLoad`). `Capacity` knows only token counts
of requests, and not which nodes they will get.
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
# Weights of a wait that was longer, or shorter, than estimated. Longer waits weigh more, because
# deadlines matter.
_BIAS_UP, _BIAS_DOWN = 0.1, 0.02
_LEAST_WAIT_S = 0.5  # shorter estimated waits do not show how good estimates are


class Capacity:
    """Estimates how much work one base model's nodes can take.

    Args:
        fleet: returns the nodes that may get requests now.
        prefill_window_s: a prefill node with at most this many seconds of queued work takes more.
        shared_prefill_window_s: smaller limit for a tenant that must leave room to others; does
            not count the part of the first prompt that is done.
        clock: the clock of the nodes' loads.
        prompt_fleet: returns the nodes for pooled prompts, which need no decode node; None:
            ``fleet``.
        awaits_newcomers: returns whether the router has just started, so that requests wait until
            the first nodes have joined; None: requests never wait for a first node.

    Attributes:
        bias: factor by which recent waits were longer than estimated.
    """

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        prefill_window_s: float = PREFILL_WINDOW_S,
        *,
        shared_prefill_window_s: float = SHARED_PREFILL_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
        prompt_fleet: Callable[[], Fleet] | None = None,
        awaits_newcomers: Callable[[], bool] | None = None,
    ) -> None:
        self._fleet = fleet
        self._prompt_fleet = prompt_fleet or fleet
        self._awaits_newcomers = awaits_newcomers or bool
        self._prefill_window_s = prefill_window_s
        self._shared_prefill_window_s = min(shared_prefill_window_s, prefill_window_s)
        self._clock = clock
        self.bias = 1.0

    def has_room(self, num_prompt_tokens: int, max_tokens: int, *, shares: bool = False) -> bool:
        """Return whether some pair of nodes can take a request now.

        Also returns True if there is no pair and none is awaited, so that the request fails with
        the reason.

        Args:
            shares: whether to leave room to other tenants, so that their next request does not
                wait. Then only enough work is queued to keep prefill nodes busy, and some KV is
                kept free.
        """
        fleet = self._fleet()
        if not fleet:
            return not self._awaits_newcomers()
        prefills = fleet.prefills or fleet.self_prefilling
        if not self._has_time(prefills, shares=shares, pooled=False):
            return False
        needed = self.kv_tokens(num_prompt_tokens, max_tokens)
        headroom = 2 * _KV_HEADROOM if shares else _KV_HEADROOM
        return any(_has_kv_room(node, needed, headroom) for node in _receivers(fleet))

    def has_time(self, *, shares: bool = False) -> bool:
        """Return whether a prefill node can take a pooled prompt now.

        Also returns True if there is no prefill node and none is awaited.

        Args:
            shares: whether to leave room to other tenants; see `has_room`.
        """
        prefills = self._prompt_fleet().prefills
        if not prefills:
            return not self._awaits_newcomers()
        return self._has_time(prefills, shares=shares, pooled=True)

    def _has_time(self, prefills: Sequence[NodeLoad], *, shares: bool, pooled: bool) -> bool:
        if shares:
            now, window_s = self._clock(), self._shared_prefill_window_s
            return any(_left_s(node, now) <= window_s for node in prefills)
        queues_s = (one.prefill_queue_s if pooled else one.sampling_queue_s for one in prefills)
        return any(queue_s <= self._prefill_window_s for queue_s in queues_s)

    def kv_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return how many tokens of KV a request will hold if its output has the mean length."""
        decodes = _receivers(self._fleet())
        if not decodes:
            return num_prompt_tokens
        return num_prompt_tokens + int(min(max_tokens, decodes[0].shared.output_tokens))

    def prefill_s(self, num_prompt_tokens: int) -> float:
        """Return the mean seconds that a prefill node computes a prompt until its first token."""
        fleet = self._fleet()
        prefills = fleet.prefills or fleet.self_prefilling
        return _MeanTimes(prefills).prompts_s(1, num_prompt_tokens, num_prompt_tokens**2 / 2)

    def wait_s(
        self,
        num_requests: float,
        num_prompt_tokens: float,
        num_kv_tokens: float,
        *,
        num_prompt_pairs: float = 0.0,
        last: int = 0,
    ) -> float:
        """Return the seconds until all of some further requests have their first tokens.

        Args:
            num_requests, num_prompt_tokens, num_kv_tokens: sums over these requests.
            num_prompt_pairs: half of the sum of the squares of their prompt tokens: the number of
                pairs of a prompt token and an earlier one.
            last: number of prompt tokens of one more request behind them, whose first token is
                waited for, too; a single node computes its whole prompt.
        """
        fleet = self._fleet()
        prefills, decodes = fleet.prefills or fleet.self_prefilling, _receivers(fleet)
        if not prefills or not decodes:
            return 0.0
        times = _MeanTimes(prefills)
        work_s = times.prompts_s(num_requests, num_prompt_tokens, num_prompt_pairs)
        prefill_s = _level([node.prefill_queue_s for node in prefills], work_s)
        room = sum(_room(node) for node in decodes)
        num_free = sum(node.num_free_tokens for node in decodes) - room * _KV_HEADROOM
        num_held = max(room - num_free, 1.0)
        # All KV that decode nodes hold becomes free, on average, within the mean time that a
        # request decodes.
        room_s = (num_kv_tokens - num_free) * decodes[0].shared.residence_s / num_held
        last_s = times.prompts_s(1, last, last**2 / 2) if last else 0.0
        return self.bias * (max(prefill_s, room_s, 0.0) + last_s)

    def decode_s(self, max_tokens: int) -> float:
        """Return the seconds from the first to the last token of an output.

        Assumes a length that few outputs exceed.
        """
        decodes = _receivers(self._fleet())
        if not decodes:
            return 0.0
        lately = decodes[0].shared
        num_tokens = min(max_tokens, lately.long_output_tokens)
        # A decode node holds an output from the second token, for which it may wait a step, to the
        # last token.
        return (num_tokens + 1) * lately.residence_s / max(lately.output_tokens - 2, 1.0)

    def note_wait(self, estimated_s: float, actual_s: float) -> None:
        """Correct the bias by the actual wait of a request.

        Args:
            estimated_s: the estimate before it was multiplied by the bias.
        """
        if estimated_s < _LEAST_WAIT_S:
            return
        low, high = _BIAS_LIMITS
        error = min(max(actual_s / estimated_s, low), high) - self.bias
        self.bias += (_BIAS_UP if error > 0 else _BIAS_DOWN) * error


def _level(queues_s: list[float], work_s: float) -> float:
    """Return when all queues are empty if new work always goes to the shortest queue, in seconds.

    A queue that is longer than the result gets no new work and is left out, because a node may
    report an arbitrarily long queue.
    """
    while True:
        level = (sum(queues_s) + work_s) / len(queues_s)
        lower = [queue_s for queue_s in queues_s if queue_s <= level]
        if not lower or len(lower) == len(queues_s):
            return level
        queues_s = lower


class _MeanTimes:
    """The mean times of prompts over some nodes; all times are 0 without nodes."""

    def __init__(self, nodes: Sequence[NodeLoad]) -> None:
        number = max(len(nodes), 1)
        self._base_s = sum(node.prefill.base for node in nodes) / number
        self._token_s = sum(node.prefill.per_unit for node in nodes) / number
        self._pair_s = sum(node.prefill.per_unit * node.attention_share for node in nodes) / number

    def prompts_s(self, num_prompts: float, num_tokens: float, num_pairs: float) -> float:
        """Return the seconds to compute prompts that have nothing cached; see `prompt_units`."""
        return num_prompts * self._base_s + num_tokens * self._token_s + num_pairs * self._pair_s


def _receivers(fleet: Fleet) -> Sequence[NodeLoad]:
    """Return the decode nodes that pairs use; without pairs, the decode nodes that work alone."""
    return fleet.decodes or fleet.self_prefilling


def _room(node: NodeLoad) -> int:
    return node.num_blocks * node.block_size


def _left_s(node: NodeLoad, now: float) -> float:
    """Return the seconds of work in a node's queue, without the done part of its first prompt."""
    begun_s = max(now - node.prefill_progress_at, 0.0)
    return node.prefill_queue_s - min(begun_s, node.prefill_front_s)


def _has_kv_room(node: NodeLoad, num_tokens: int, headroom: float) -> bool:
    if not node.num_batch:  # the node holds no request, so waiting would free no memory
        return True
    return node.num_free_tokens - headroom * _room(node) >= num_tokens
