"""History: rates of requests and tokens per interval, for the curves of the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.processes.shared_ticks import sleep_until_tick
from router.calls.request_log import RequestLog

INTERVAL_S = 2.0
NUM_KEPT = 150  # five minutes


@dataclass(frozen=True, slots=True)
class Interval:
    """Rates within one interval, and counts of open and queued requests at its end."""

    requests_per_s: float
    failures_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_open: int
    num_queued: int


class History:
    """Records the rates of one base model's requests at the end of each interval.

    Args:
        log: request log, from which the counts are read.
        num_queued: returns the number of requests that wait at the gate.
    """

    def __init__(self, log: RequestLog, num_queued: Callable[[], int]) -> None:
        self._log = log
        self._num_queued = num_queued
        self._before = self._counts()
        self._intervals: deque[Interval] = deque(maxlen=NUM_KEPT)

    @property
    def intervals(self) -> list[Interval]:
        """The latest recorded intervals, oldest first."""
        return list(self._intervals)

    async def run(self) -> None:
        """Record one interval after another, for ever."""
        while True:
            await sleep_until_tick(INTERVAL_S)
            self.note()

    def note(self) -> None:
        """Record the interval that ends now."""
        now, before = self._counts(), self._before
        self._before = now
        elapsed_s = max(now[0] - before[0], 1e-3)
        changes = zip(now[1:], before[1:], strict=True)
        ended, failed, prompt_tokens, output_tokens = (
            max(late - early, 0) / elapsed_s for late, early in changes
        )
        num_open, num_queued = len(self._log.open), self._num_queued()
        self._intervals.append(
            Interval(ended, failed, prompt_tokens, output_tokens, num_open, num_queued)
        )

    def _counts(self) -> tuple[float, int, int, int, int]:
        log = self._log
        num_failed = sum(log.num_failed.values())
        return (
            log.clock(),
            log.num_finished + num_failed,
            num_failed,
            log.num_prompt_tokens,
            log.num_output_tokens,
        )
