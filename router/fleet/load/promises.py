"""Promises: the deadlines of a decode node's requests, and the delay that the deadlines allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Steps are assumed to take this many times as long as predicted; without a margin, half of the
# requests would be late. The gate has the same margin.
_MARGIN = 1.15


@dataclass(slots=True, eq=False)
class Promise:
    """The deadline of one request; all times are on the router's clock.

    Attributes:
        finish_by: when the request must have finished.
        num_steps: number of decode steps that the request may take.
        arrives_at: when the request's KV is expected on the node.
        ends_with: number of the node's step that ends the request; None before its first token.
    """

    finish_by: float
    num_steps: float
    arrives_at: float
    ends_with: float | None = None


class Promises:
    """Tracks the deadlines of the requests on one decode node.

    Attributes:
        num_steps: number of decode steps that the node has made.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._open: set[Promise] = set()

    def open(self, finish_by: float, num_steps: float, arrives_at: float) -> Promise:
        """Add the deadline of a request that was placed on the node."""
        promise = Promise(finish_by, num_steps, arrives_at)
        self._open.add(promise)
        return promise

    def begin_promise(self, promise: Promise) -> None:
        """Count a request's steps from now on, because it has its first token."""
        promise.ends_with = self.num_steps + promise.num_steps

    def close(self, promise: Promise) -> None:
        """Drop the deadline of a request that ended; do nothing if it is unknown."""
        self._open.discard(promise)

    def slack_s(self, now: float, step_s: float) -> float:
        """Return for how many seconds steps may pause until some request is late.

        Negative: some request will be late in any case.

        Args:
            step_s: predicted seconds of a step without prompt tokens.
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
