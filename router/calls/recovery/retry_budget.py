"""Limits the retries of one call, and of all calls together. Knows neither nodes nor placing.

a node of the attempt is lost or silent            retry at once, at most `max_losses` times
another failure, and the budget allows a retry     retry at once, at most `max_attempts` in all
another failure, and the budget is spent           wait until the budget allows a retry
another failure, and the wait would be too long    fail: all calls together retry too much
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
# The number of calls that wait for a retry and their waiting time are limited, because each waiting
# call holds a prompt and a client's connection.
MAX_WAITING = 1024
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Limits of the retries of one call.

    Attributes:
        max_attempts: number of failed attempts after which the call fails. Preemptions and losses
            of a node do not count.
        failing_for_s: while nodes cannot reach each other, the call fails only when its first
            failure is at least this many seconds old.
        max_preemptions: the call fails after more preemptions than this. An attempt on a node that
            lacks the call's adapter counts as a preemption.
        max_losses: the call fails after more attempts than this have lost a node.
        trial_pause_s: a suspect call is tried alone after this many seconds without a lost node,
            unless a similar call is on trial (see `suspects.py`).
        pair_timeout_s: seconds that an attempt waits when no nodes can take it.
        return_timeout_s: seconds that a call waits for a crashed node to return if no other nodes
            can serve the call.
        first_pause_s: seconds of the first pause before a retry; each further pause is twice as
            long.
        longest_pause_s: maximum seconds of a pause.
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
    """Limits all calls' retries, so that failures do not multiply the load of the nodes.

    In any 10 s, 10 retries are allowed, and one more per five new calls. Further retries wait until
    the budget allows them. A retry that would wait too long fails instead.

    Args:
        ratio: retries allowed per new call.
        floor: retries allowed in any 10 s, whatever the number of calls.
        clock: returns seconds.

    Attributes:
        num_waiting: number of calls that wait for a retry.
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
        # [second, new calls, retries] of each second in the window, oldest first
        self._seconds: deque[list[int]] = deque()

    def note_call(self) -> None:
        """Count a new call."""
        self._now()[1] += 1

    def acquire_retry(self) -> bool:
        """Count one retry if the budget allows it; return whether it does."""
        now = self._now()
        if sum(second[2] for second in self._seconds) >= self._allowance():
            return False
        now[2] += 1
        return True

    def is_storm(self, patience_s: float) -> bool:
        """Return whether so many calls wait for a retry that no further call may wait.

        Args:
            patience_s: seconds that the further call could wait.
        """
        self._now()
        could_begin = self._allowance() / WINDOW_S * min(patience_s, PATIENCE_S)
        return self.num_waiting >= min(could_begin, MAX_WAITING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the caller as a call that waits for a retry while this context lasts."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def _allowance(self) -> int:
        """Return the number of retries allowed in the current window of 10 s."""
        return self._floor + int(self._ratio * sum(second[1] for second in self._seconds))

    def _now(self) -> list[int]:
        second = int(self.clock())
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        return self._seconds[-1]


class CallRetries:
    """Counts one call's failed attempts against the limits of its retries.

    Args:
        options: the call's limits.
        budget: limits the retries of all calls together.
    """

    def __init__(self, options: RetryOptions, budget: RetryBudget) -> None:
        self._options = options
        self._budget = budget
        self._num_preemptions = 0
        self._num_losses = 0
        # One function per failed attempt, which returns whether the attempt lost a node.
        self._failures: list[Callable[[], bool]] = []
        self._failing_since = 0.0
        # The last failed attempt's function; None: the attempt was preempted
        self._latest: Callable[[], bool] | None = None

    @property
    def num_failed(self) -> int:
        """Number of failed attempts, for any reason."""
        return self._num_preemptions + self._num_losses + len(self._failures)

    def note_failure(self, error: RequestError, was_loss: Callable[[], bool]) -> None:
        """Count a failed attempt that may be retried.

        Retries after the loss of a node have a higher limit and need no budget: the loss is not the
        call's fault, and the retry takes the place of work that the lost node no longer does.

        Args:
            was_loss: returns whether the attempt failed because a node is lost or silent. Called
                repeatedly, because the loss may be noticed after the other node's error.

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
        """Return whether the next attempt may begin now; if not, the caller asks again later."""
        self._count_failures()
        return self._latest not in self._failures or self._budget.acquire_retry()

    @property
    def needs_pause(self) -> bool:
        """Return whether so many attempts failed that the next attempt must wait."""
        return self._latest in self._failures and len(self._failures) >= self._options.max_attempts

    def _may_pass(self, error: RequestError) -> bool:
        """Return whether nodes have just lost each other, so that the failure may end by itself."""
        if error.code != "UNAVAILABLE" or self._options.max_attempts == 1:
            return False
        return self._budget.clock() - self._failing_since < self._options.failing_for_s

    def _count_failures(self) -> int:
        """Count the failed attempts that did not lose a node.

        Attempts that turned out to have lost a node are counted as losses from now on.
        """
        failures = [was_loss for was_loss in self._failures if not was_loss()]
        self._num_losses += len(self._failures) - len(failures)
        self._failures = failures
        return len(failures)
