"""How often a call, and all calls together, may be tried again. Knows neither nodes nor placing.

a node of the attempt is lost, or silent     tried again at once, `max_losses` times
anything else, and the budget has some left  tried again at once, `max_attempts` in all
anything else, and the budget is spent       waits for its turn
the turn would come too late: a storm        ends
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.api.errors import ConfigError, NodeUnavailableError, OverloadedError
from baton.link.words import RequestError

WINDOW_S = 10.0
# Calls that wait for a retry hold their prompts, and their clients: so many, and so long.
MAX_WAITING = 1024
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Limits of one call.

    Attributes:
        max_attempts: that fail before the call does; those that end in a preemption, or because a
            node is gone, do not count.
        failing_for_s: a call whose attempts fail as nodes do not reach each other ends only when
            the first of them did so long ago.
        max_preemptions: after so many the call fails.
        max_losses: of attempts that end because a node is gone; with one more the call fails.
        trial_pause_s: what a node had begun to compute when it was lost is tried again when no node
            was lost for so long, where nothing else of that kind is (see `suspects.py`).
        pair_timeout_s: how long an attempt waits for a pair of nodes when there is none.
        return_timeout_s: how long a call waits for a node that went away by itself, if there is no
            pair without that node.
        first_pause_s: before an attempt that has to use again what has just failed; doubles.
        longest_pause_s: of those pauses.
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
    """Keeps retries from multiplying the load of a cluster that is ill anyway.

    Of all calls of the last 10 s one in five may be tried again, and 10 more however few they are.
    More than that wait: what fails for a moment costs a pause. Where so many wait that the next one
    would have its turn too late, nothing is better for waiting.

    Args:
        clock: seconds; tests bring their own.

    Attributes:
        num_waiting: calls that wait for their turn.
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
        self._seconds: deque[list[int]] = deque()  # [second, calls, retries], oldest first

    def note_call(self) -> None:
        """A new call came."""
        self._now()[1] += 1

    def take(self) -> bool:
        """Whether one more retry may be made; it counts as made."""
        now = self._now()
        if sum(second[2] for second in self._seconds) >= self._allowance():
            return False
        now[2] += 1
        return True

    def is_storm(self, patience_s: float) -> bool:
        """Whether one more that waits would not have its turn within so many seconds."""
        self._now()
        could_begin = self._allowance() / WINDOW_S * min(patience_s, PATIENCE_S)
        return self.num_waiting >= min(could_begin, MAX_WAITING)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait of one call."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def _allowance(self) -> int:
        """Retries within the window."""
        return self._floor + int(self._ratio * sum(second[1] for second in self._seconds))

    def _now(self) -> list[int]:
        second = int(self.clock())
        while self._seconds and self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        return self._seconds[-1]


class CallRetries:
    """What one call has used up of its limits.

    Args:
        options: its limits.
        budget: of all calls together.
    """

    def __init__(self, options: RetryOptions, budget: RetryBudget) -> None:
        self._options = options
        self._budget = budget
        self._num_preemptions = 0
        self._num_losses = 0
        self._failures: list[Callable[[], bool]] = []  # that were no losses yet: are they now?
        self._failing_since = 0.0
        self._latest: Callable[[], bool] | None = None  # None: a preemption

    @property
    def num_failed(self) -> int:
        """Attempts that failed, for whatever reason."""
        return self._num_preemptions + self._num_losses + len(self._failures)

    def note_failure(self, error: RequestError, was_loss: Callable[[], bool]) -> None:
        """An attempt failed with an error that another one need not meet.

        Losing a node is no fault of the call, and that each of a node's calls is tried once more
        is no more load than there was: it counts less, and needs no budget.

        Args:
            was_loss: whether it failed because a node is gone, or is silent. Asked again until it
                says so: that a node is gone may be heard behind what the other one says of it.

        Raises:
            OverloadedError: there were too many preemptions.
            NodeUnavailableError: there must be no other attempt, for the reason that it says.
        """
        options = self._options
        if error.code == "PREEMPTED":
            self._num_preemptions += 1
            self._latest = None
            if self._num_preemptions > options.max_preemptions:
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
        """Whether the next attempt may begin now; else this is to be asked again in a while."""
        self._count_failures()
        return self._latest not in self._failures or self._budget.take()

    @property
    def needs_pause(self) -> bool:
        """Whether it failed so often that the next attempt is not to begin at once."""
        return self._latest in self._failures and len(self._failures) >= self._options.max_attempts

    def _may_pass(self, error: RequestError) -> bool:
        """Whether what is wrong is between nodes, and not for long."""
        if error.code != "UNAVAILABLE" or self._options.max_attempts == 1:
            return False
        return self._budget.clock() - self._failing_since < self._options.failing_for_s

    def _count_failures(self) -> int:
        """Without those that turned out to be losses, which they then stay."""
        failures = [was_loss for was_loss in self._failures if not was_loss()]
        self._num_losses += len(self._failures) - len(failures)
        self._failures = failures
        return len(failures)
