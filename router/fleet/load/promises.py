"""Promises: deadlines of the requests on a decode node, and the delay that they still permit.

`Promises` knows deadlines and steps, but neither prompts nor memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Without a margin, half of the requests would finish late; the gate has the same margin.
_MARGIN = 1.15


@dataclass(slots=True, eq=False)
class Promise:
    """The deadline of a request; times are by the node's clock.

    Attributes:
        num_steps: decode steps that the request may take.
        arrives_at: when the request's KV is expected.
        ends_with: number of the node's step that ends the request; None before its first token.
    """

    finish_by: float
    num_steps: float
    arrives_at: float
    ends_with: float | None = None


class Promises:
    """Tracks the deadlines of the requests on one decode node.

    Attributes:
        num_steps: steps that the node has made.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._open: set[Promise] = set()

    def open(self, finish_by: float, num_steps: float, arrives_at: float) -> Promise:
        """Add the promise that a placed request must finish by ``finish_by``."""
        promise = Promise(finish_by, num_steps, arrives_at)
        self._open.add(promise)
        return promise

    def begin_promise(self, promise: Promise) -> None:
        """Count a promise's steps from now on, because the request has its first token."""
        promise.ends_with = self.num_steps + promise.num_steps

    def close(self, promise: Promise) -> None:
        """Drop the promise of a request that ended; harmless if it is unknown."""
        self._open.discard(promise)

    def slack_s(self, now: float, step_s: float) -> float:
        """Return how long steps may pause until a request is late; negative: one will be late.

        Args:
            step_s: duration of a step without prompts.
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
