"""Capacity: what all nodes together can take now, and how long until they can take more.

Built on what nodes are known to have before them and how fast they were (`NodeView`). Knows
requests only as numbers of tokens, and not which node will get one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.fleet import Fleet
from router.policies.base import NodeView

PREFILL_WINDOW_S = 0.5
# Kept free in each decode node, for the answers that grow there.
_KV_HEADROOM = 0.05
_BIAS_LIMITS = (0.25, 4.0)
_BIAS_SMOOTHING = 0.1
_LEAST_WAIT_S = 0.02  # shorter ones say nothing of how good the estimate is


class Capacity:
    """Of one router's fleet.

    Args:
        fleet: what may be placed on now.
        prefill_window_s: work that a prefill node may have before it.
    """

    def __init__(
        self, fleet: Callable[[], Fleet], prefill_window_s: float = PREFILL_WINDOW_S
    ) -> None:
        self._fleet = fleet
        self._prefill_window_s = prefill_window_s
        self._bias = 1.0  # how much longer than estimated requests waited

    def has_room(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether some pair can take a request now; where there is none it goes on, to be told."""
        fleet = self._fleet()
        if not fleet:
            return True
        window_s = self._prefill_window_s
        if not any(
            node.prefill_queue_s <= window_s for node in (*fleet.prefills, *fleet.self_prefilling)
        ):
            return False
        needed = self.kv_tokens(num_prompt_tokens, max_tokens)
        return any(_has_kv_room(node, needed) for node in _receivers(fleet))

    def kv_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """That a request will come to hold; most answers are much shorter than they may be."""
        decodes = _receivers(self._fleet())
        if not decodes:
            return num_prompt_tokens
        return num_prompt_tokens + int(min(max_tokens, decodes[0].shared.output_tokens))

    def wait_s(self, num_requests: int, num_prompt_tokens: int, num_kv_tokens: int) -> float:
        """Until so many more requests, with so many tokens in all, have their first tokens."""
        fleet = self._fleet()
        prefills, decodes = fleet.prefills or fleet.self_prefilling, _receivers(fleet)
        if not prefills or not decodes:
            return 0.0
        work_s = sum(node.prefill_queue_s for node in prefills)
        work_s += num_requests * sum(node.prefill.base for node in prefills) / len(prefills)
        work_s += num_prompt_tokens * sum(n.prefill.per_unit for n in prefills) / len(prefills)
        room = sum(_room(node) for node in decodes)
        num_free = sum(node.num_free_tokens for node in decodes) - room * _KV_HEADROOM
        num_held = max(room - num_free, 1.0)
        # A decode node gives back what it holds about once in the time that a request stays.
        room_s = (num_kv_tokens - num_free) * decodes[0].shared.residence_s / num_held
        return self._bias * max(work_s / len(prefills), room_s, 0.0)

    def decode_s(self, max_tokens: int) -> float:
        """From the first token of an answer to its last."""
        decodes = _receivers(self._fleet())
        if not decodes:
            return 0.0
        usual = decodes[0].shared
        return usual.residence_s * min(1.0, max_tokens / max(usual.output_tokens, 1.0))

    def note_wait(self, expected_s: float, actual_s: float) -> None:
        """A request that was expected to begin so late began then."""
        if expected_s < _LEAST_WAIT_S:
            return
        ratio = self._bias * actual_s / expected_s
        low, high = _BIAS_LIMITS
        self._bias += _BIAS_SMOOTHING * (min(max(ratio, low), high) - self._bias)


def _receivers(fleet: Fleet) -> Sequence[NodeView]:
    """Decode nodes of the fleet; those that no prefill node reaches, where there is no pair."""
    return fleet.decodes or fleet.self_prefilling


def _room(node: NodeView) -> int:
    return node.num_blocks * node.block_size


def _has_kv_room(node: NodeView, num_tokens: int) -> bool:
    if not node.num_batch:  # nothing there that could ever make room
        return True
    return node.num_free_tokens - _KV_HEADROOM * _room(node) >= num_tokens
