"""Limits the retries of one call, and of all calls together. Knows neither nodes nor placing.

a node of the attempt is lost or silent            retry at once, `max_losses` times
another failure, and the budget allows a retry     retry at once, `max_attempts` in all
another failure, and the budget is spent           wait for the budget
another failure, and the wait would be too long    fail: a retry storm
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.api.errors import ConfigError, NodeUnavailableError, OverloadedError
from baton.link.words import ADAPTER_MISSING, MOVED, RequestError

WINDOW_S = 10.0
# Waiting calls hold prompts and clients' connections, so their number and their waiting time are
# limited.
MAX_WAITING = 1024
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Limits of one call.

    Attributes:
        max_attempts: failed attempts after which the call fails. Preemptions and losses of a node
            do not count.
        failing_for_s: while nodes cannot reach each other, the call fails only when its first
            failure is at least this many seconds old.
        max_preemptions: the call fails after more preemptions; an attempt on a node that lacks the
            call's adapter counts as a preemption.
        max_losses: the call fails after losing a node in more attempts.
        trial_pause_s: a suspect call is tried alone after this many seconds without a lost node,
            unless a similar call is on trial (see `suspects.py`).
        pair_timeout_s: how long an attempt waits when no nodes can take it.
        return_timeout_s: how long a call waits for a crashed node to return if no other nodes can
            serve the call.
        first_pause_s: pause before an attempt on nodes that just failed; doubles each time.
        longest_pause_s: upper limit of this pause.
    """

    max_attempts: int = 3
    failing_for_s: float = 15.0
    max_preemptions: int = 20
    max_losses: int = 10
    trial_pause_s: float = 1.0
    pair_timeout_s: float = 5.0
    return_timeout_s: float = 60.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts: must be 1 or more, got {self.max_attempts}")
        if not self.pair_timeout_s >= 0:
            raise ConfigError(f"pair_timeout_s: must be 0 or more, got {self.pair_timeout_s:g}")
        if not self.return_timeout_s >= 0:
            raise ConfigError(f"return_timeout_s: must be 0 or more, got {self.return_timeout_s:g}")


class RetryBudget:
    """Keep retries from multiplying the load of a cluster in trouble.

    In any 10 s, 10 retries are allowed, and one more per five calls. Further retries wait until
    short failures are over. A retry that would wait too long fails instead.

    Args:
        clock: returns seconds.

    Attributes:
        num_waiting: calls that wait for a retry.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.2,
        floor: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ratio = ratio
        self._floor = floor
        self.clock = clock
        self.num_waiting = 0
        self._seconds: deque[list[int]] = deque()  # [second, calls, retries] each, oldest first

    def note_call(self) -> None:
        """Count a new call."""
        self._now()[1] += 1

    def acquire_retry(self) -> bool:
        """Count one more retry if the budget allows it; return whether it does."""
        now = self._now()
        if sum(second[2] for second in self._seconds) >= self._allowance():
            return False
        now[2] += 1
        return True

    def is_storm(self, patience_s: float) -> bool:
        """Return whether one more waiting retry would wait longer than ``patience_s`` seconds."""
        self._now()
        could_begin = self._allowance() / WINDOW_S * min(patience_s, PATIENCE_S)
        return self.num_waiting >= min(could_begin, MAX_WAITING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one waiting call while this context lasts."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def _allowance(self) -> int:
        """Return the number of retries allowed within the window."""
        return self._floor + int(self._ratio * sum(second[1] for second in self._seconds))

    def _now(self) -> list[int]:
        second = int(self.clock())
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        return self._seconds[-1]


class CallRetries:
    """Count one call's failures against its limits.

    Args:
        options: the call's limits.
        budget: shared by all calls.
    """

    def __init__(self, options: RetryOptions, budget: RetryBudget) -> None:
        self._options = options
        self._budget = budget
        self._num_preemptions = 0
        self._num_losses = 0
        # Functions that return whether a failed attempt lost a node
        self._failures: list[Callable[[], bool]] = []
        self._failing_since = 0.0
        self._latest: Callable[[], bool] | None = None  # the last failure; None: a preemption

    @property
    def num_failed(self) -> int:
        """Number of failed attempts, for any reason."""
        return self._num_preemptions + self._num_losses + len(self._failures)

    def note_failure(self, error: RequestError, was_loss: Callable[[], bool]) -> None:
        """Count a failed attempt that may be retried.

        A lost node is not the call's fault, and retrying its calls does not add any load. These
        retries do not use any budget and have a higher limit.

        Args:
            was_loss: returns whether the attempt failed because a node is gone or silent. Called
                repeatedly, because the loss may be noticed after the peer's error.

        Raises:
            OverloadedError: too many preemptions.
            NodeUnavailableError: too many losses or failures.
        """
        options = self._options
        if error.code in MOVED:
            self._num_preemptions += 1
            self._latest = None
            if self._num_preemptions > options.max_preemptions:
                if error.code == ADAPTER_MISSING:
                    raise NodeUnavailableError(error.message)
                raise OverloadedError(f"{error.message} (preempted {self._num_preemptions} times)")
            return
        if not self._failures:
            self._failing_since = self._budget.clock()
        self._failures.append(was_loss)
        self._latest = was_loss
        num_failures = self._count_failures()
        if self._num_losses > options.max_losses:
            raise NodeUnavailableError(f"{error.message} (lost {self._num_losses} nodes)")
        if num_failures >= options.max_attempts and not self._may_pass(error):
            raise NodeUnavailableError(
                f"{error.message} (attempt {num_failures} of {options.max_attempts})"
            )

    def may_begin(self) -> bool:
        """Return whether the next attempt may begin now; if not, ask again later."""
        self._count_failures()
        return self._latest not in self._failures or self._budget.acquire_retry()

    @property
    def needs_pause(self) -> bool:
        """Return whether so many attempts failed that the next attempt must wait."""
        return self._latest in self._failures and len(self._failures) >= self._options.max_attempts

    def _may_pass(self, error: RequestError) -> bool:
        """Return whether the failure may pass by itself: nodes have just lost each other."""
        if error.code != "UNAVAILABLE" or self._options.max_attempts == 1:
            return False
        return self._budget.clock() - self._failing_since < self._options.failing_for_s

    def _count_failures(self) -> int:
        """Return the number of failures, without those that turned out to be losses of a node."""
        failures = [was_loss for was_loss in self._failures if not was_loss()]
        self._num_losses += len(self._failures) - len(failures)
        self._failures = failures
        return len(failures)
