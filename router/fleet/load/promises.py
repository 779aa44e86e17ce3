"""Promises: by when what is on a decode node has to end, and how much later it may get there.

Knows deadlines and steps; nothing of prompts, memory, or of who may break a promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# As the gate: what would be just in time comes too late as often as not.
_MARGIN = 1.15


@dataclass(slots=True, eq=False)
class Promise:
    """Of one request; times by the node's clock.

    Attributes:
        num_steps: that it may take.
        arrives_at: when its KV is expected.
        ends_with: the node's step that is its last one; None until it has begun.
    """

    finish_by: float
    num_steps: float
    arrives_at: float
    ends_with: float | None = None


class Promises:
    """Of the requests on one decode node.

    Attributes:
        num_steps: that the node has made.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._open: set[Promise] = set()

    def open(self, finish_by: float, num_steps: float, arrives_at: float) -> Promise:
        """Add that of a request that was placed; see `Promise`."""
        promise = Promise(finish_by, num_steps, arrives_at)
        self._open.add(promise)
        return promise

    def begin(self, promise: Promise) -> None:
        """Count its steps from now on: its first token on this node came."""
        promise.ends_with = self.num_steps + promise.num_steps

    def close(self, promise: Promise) -> None:
        """Drop it: the request ended; harmless when it is not there."""
        self._open.discard(promise)

    def slack_s(self, now: float, step_s: float) -> float:
        """How long all steps may pause before the first promise is broken; below 0: one will be.

        Args:
            step_s: of a step without prompts. O(requests).
        """
        step_s *= _MARGIN
        slack_s = math.inf
        for promise in self._open:
            begins_at, num_steps = now, promise.num_steps
            if promise.ends_with is None:
                begins_at = max(promise.arrives_at, now)
            else:
                num_steps = max(promise.ends_with - self.num_steps, 0.0)
            slack_s = min(slack_s, promise.finish_by - begins_at - num_steps * step_s)
        return slack_s
