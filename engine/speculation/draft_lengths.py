"""Decides how many drafts pay off, from measured step times and acceptance rates.

A step yields one token per request and one more per accepted draft, but takes longer with more
drafts. The chosen number of drafts gives the most tokens per second; it is 0 if drafts do not pay
off. Refuses to know: requests' tokens, the proposer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

YES: Callable[[], bool] = lambda: True  # noqa: E731
# If a step size (number of tokens) has at least this many samples, their median is the size's cost.
# Otherwise, their minimum is, because the first steps of a size may compile kernels.
_ENOUGH = 5
TRIED = 3  # number of samples after which the cost of a size is known
# A size's measured time stays valid for `_FRESH` steps. If another size seems faster by a factor
# below `_MUCH`, the difference may be chance, so the time stays valid only for `_FRESH_IF_LITTLE`
# steps.
_FRESH, _FRESH_IF_LITTLE, _MUCH = 256, 48, 1.3
_SAMPLES = 5  # latest samples kept per size; their median ignores slow moments
_FORGET_AFTER = 2000  # steps after which the samples of an unused size are dropped
_MEMORY = 0.93  # decay of one request's acceptance rate, per checked draft
_MEMORY_OF_ALL = 0.99  # decay of the acceptance rate of all requests, per checked draft
_PRIOR_WEIGHT = 2.0  # weight, in drafts, of all requests' rate in one request's rate
_FIRST_PRIOR = 0.7
_FIRST_TRIED = 8  # first steps with drafts whose times are ignored, as they record tapes
TRY_AFTER = 512  # steps without drafts until a trial; doubles after each trial
TRY_AT_LEAST = 8192  # maximum number of steps without drafts until a trial
TRIAL_SHARE = 0.005  # largest share of all time that trials may take
# Drafts must multiply the tokens per second by this factor, or none are made: smaller gains are
# within noise, and requests that finish early leave smaller batches.
_MARGIN = 1.1


class StepCosts:
    """Measured seconds by size: of decode-only steps by tokens, or of drafting by requests."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._noted_at: dict[int, deque[int]] = {}
        self._num_noted = 0
        # Typical seconds of a step by size, ascending. Sizes with fewer than `TRIED` samples are in
        # this dict only if no size has more.
        self._typical: dict[int, float] = {}
        self._num_known = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step that only decoded."""
        size = _size_class(num_tokens)
        if size not in self._samples:
            self._samples[size] = deque(maxlen=_SAMPLES)
            self._noted_at[size] = deque(maxlen=TRIED)
        samples = self._samples[size]
        samples.append(seconds)
        self._num_noted += 1
        self._noted_at[size].append(self._num_noted)
        if self._num_noted % 64 == 0:
            self._forget()
        if size in self._typical and len(samples) != TRIED:
            self._typical[size] = _of(samples)
        elif len(samples) >= TRIED or not self._num_known:
            self._look_again()

    def is_fresh(self, num_tokens: int, gain: float) -> bool:
        """Return whether steps of this size were measured often and recently enough.

        Args:
            gain: tokens per second that other sizes seem to give, as a multiple of those of this
                size.
        """
        noted_at = self._noted_at.get(_size_class(num_tokens))
        if noted_at is None or len(noted_at) < TRIED:
            return False
        return self._num_noted - noted_at[0] < (_FRESH if gain >= _MUCH else _FRESH_IF_LITTLE)

    def _forget(self) -> None:
        oldest = self._num_noted - _FORGET_AFTER
        for old in [size for size, at in self._noted_at.items() if at[-1] < oldest]:
            del self._samples[old], self._noted_at[old]
            self._look_again()

    def _look_again(self) -> None:
        known = {size: own for size, own in self._samples.items() if len(own) >= TRIED}
        self._num_known = len(known)
        self._typical = {size: _of(own) for size, own in sorted((known or self._samples).items())}

    def seconds(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the expected seconds of steps with these numbers of tokens, which ascend.

        Interpolates linearly between measured sizes. Beyond the largest measured size, extends the
        line from the smallest to the largest one. With only one measured size, assumes the same
        time for all, so that other sizes are tried and then measured.
        """
        sizes, costs = list(self._typical), np.array(list(self._typical.values()))
        if not sizes:
            return np.ones(len(num_tokens))
        # A larger step cannot be faster: if it was, the smaller step was measured in a slow moment.
        costs = np.minimum.accumulate(costs[::-1])[::-1]
        found: NDArray[np.float64] = np.interp(num_tokens, sizes, costs)
        if len(sizes) > 1:
            slope = float(costs[-1] - costs[0]) / (sizes[-1] - sizes[0])
            found = found + slope * np.maximum(num_tokens - sizes[-1], 0)
        return found


def _of(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2] if len(samples) >= _ENOUGH else min(samples)


class DraftingCosts:
    """Measured seconds of making drafts, by number of drafts and of requests."""

    def __init__(self) -> None:
        # Measured costs, by number of drafts and then by number of requests
        self._costs: dict[int, StepCosts] = {}
        self._num_noted = 0

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the seconds of making ``num_drafts`` drafts for each of ``num_rows`` requests."""
        self._num_noted += 1
        self._costs.setdefault(num_drafts, StepCosts()).note(num_rows, seconds)

    def seconds(self, num_rows: int, most: int) -> NDArray[np.float64]:
        """Return the expected seconds of making 0, 1, ..., ``most`` drafts: ``[most + 1]``.

        The expected time of n drafts is at most the time measured for more drafts, and at most n /
        m times the time measured for m < n drafts, because the first draft takes longest. So a
        number of drafts that was measured in a slow moment, or before a tape was recorded, is tried
        again. All times are 0 at first, so that drafts are tried.
        """
        found = np.zeros(most + 1)
        if self._num_noted < _FIRST_TRIED:
            return found
        numbers = np.arange(1, most + 1)
        rows = np.array([num_rows])
        found[1:] = np.inf
        for measured, own in self._costs.items():
            of_one = np.maximum(numbers / measured, 1.0)
            found[1:] = np.minimum(found[1:], own.seconds(rows)[0] * of_one)
        return found


def _size_class(num_tokens: int) -> int:
    """Round a number of tokens to a size: each number up to 16, then eight sizes per doubling."""
    step = 1 << max(num_tokens.bit_length() - 4, 0)
    return (num_tokens + step // 2) // step * step


class Acceptance:
    """The rate at which drafts of one request, or of all requests, are accepted."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._right = self._looked_at = 0.0

    @classmethod
    def of_all(cls) -> Acceptance:
        """Make the acceptance rate of all requests, which decays more slowly."""
        return cls(_MEMORY_OF_ALL)

    def note(self, is_right: bool) -> None:
        """Count a draft that was compared with a sampled token; skip drafts after a wrong one."""
        self._right = self._right * self._memory + is_right
        self._looked_at = self._looked_at * self._memory + 1

    def rate(self, prior: float = _FIRST_PRIOR) -> float:
        """Return the chance that a draft is right if earlier ones are; ``prior`` without data."""
        rate = (self._right + _PRIOR_WEIGHT * prior) / (self._looked_at + _PRIOR_WEIGHT)
        return min(rate, 0.99)


def choose_lengths(
    costs: StepCosts, num_rows: int, num_drafts: Sequence[int], rates: Sequence[float]
) -> tuple[list[int], Choice]:
    """Return how many drafts of each request the next step should verify, and the reasons.

    Args:
        num_rows: number of requests in the step, with or without drafts.
        num_drafts: number of drafts of each request.
        rates: acceptance rate of each request (`Acceptance.rate`).
    """
    requests = np.repeat(np.arange(len(num_drafts)), num_drafts)
    places = np.concatenate([np.arange(1, num + 1) for num in num_drafts])
    chances = np.asarray(rates)[requests] ** places
    # In this order, a request's earlier drafts come before its later drafts.
    order = np.argsort(-chances, kind="stable")
    tokens = num_rows + np.concatenate(([0.0], np.cumsum(chances[order])))
    seconds = costs.seconds(num_rows + np.arange(len(tokens)))
    speed = tokens / seconds
    best = int(np.argmax(speed))
    if speed[best] < _MARGIN * speed[0]:
        best = 0
    lengths: list[int] = np.bincount(requests[order[:best]], minlength=len(num_drafts)).tolist()
    step_s = (float(seconds[0]), float(seconds[best]), float(seconds[-1]))
    gain = float(speed[best] / speed[0])
    return lengths, Choice(best, len(order), num_rows, sum(rates) / len(rates), step_s, gain)


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision on the number of drafts, with the figures that led to it.

    Attributes:
        num_drafts: number of drafts to verify, summed over the requests of the step.
        num_possible: number of available drafts, summed over the requests of the step.
        num_rows: number of requests in the step.
        rate: mean acceptance rate of the requests with drafts.
        step_s: expected seconds of a step without drafts, with the chosen drafts, and with all
            drafts.
        gain: tokens per second with the chosen drafts, as a multiple of those without drafts.
        drafting_s: expected seconds of making the drafts; 0: making drafts takes no time.
    """

    num_drafts: int
    num_possible: int
    num_rows: int
    rate: float
    step_s: tuple[float, float, float]
    gain: float = 1.0
    drafting_s: float = 0.0

    def __str__(self) -> str:
        none, chosen, most = (f"{1e3 * seconds:.3g}" for seconds in self.step_s)
        drafting = f", drafting {1e3 * self.drafting_s:.3g} ms" if self.drafting_s else ""
        return (
            f"{self.num_drafts} of {self.num_possible} drafts paid in a step of {self.num_rows} "
            f"requests: {self.rate:.0%} are right; steps with none, these and all of them take "
            f"{none}, {chosen} and {most} ms{drafting}"
        )


def choose_num_drafts(
    costs: StepCosts, drafting: DraftingCosts, num_rows: int, most: int, rate: float
) -> tuple[int, Choice]:
    """Return how many drafts to make per request, given what drafting costs, and the reasons.

    Args:
        num_rows: number of requests in the next step.
        most: maximum number of drafts per request.
        rate: acceptance rate of all requests (`Acceptance.rate`).
    """
    numbers = np.arange(most + 1)
    tokens = np.cumsum(rate**numbers)
    seconds = costs.seconds(num_rows * (1 + numbers))
    drafting_s = drafting.seconds(num_rows, most)
    speed = tokens / (seconds + drafting_s)
    best = int(np.argmax(speed))
    if speed[best] < _MARGIN * speed[0]:
        best = 0
    step_s = (float(seconds[0]), float(seconds[best]), float(seconds[-1]))
    possible = (num_rows * best, num_rows * most)
    gain = float(speed[best] / speed[0])
    return best, Choice(*possible, num_rows, rate, step_s, gain, float(drafting_s[best or most]))


class Trials:
    """Decides when to try drafts again after they stopped paying off, at growing intervals.

    Trials may take only a small share of all time, because a trial in which the drafter must read
    many tokens takes as long as many steps.
    """

    def __init__(self) -> None:
        self._num_silent = self._num_left = 0
        self._wait = TRY_AFTER
        self._owed = 0.0  # steps to wait because of the latest trial's cost

    @property
    def is_overdue(self) -> bool:
        """Return whether a trial would begin now if a running request could get drafts."""
        return self._num_silent > max(self._wait, self._owed)

    def is_due(self, can_draft: Callable[[], bool] = YES) -> bool:
        """Return whether to make drafts as a trial, although they do not pay off; call once a step.

        Args:
            can_draft: returns whether any running request can get drafts.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        self._num_silent += 1
        if not self.is_overdue or not can_draft():
            return False
        self._num_silent, self._num_left, self._owed = 0, TRIED - 1, 0.0
        self._wait = min(2 * self._wait, TRY_AT_LEAST)
        return True

    def note_cost(self, num_steps: float) -> None:
        """Record how long the drafts of a trial took, as a multiple of a step's time."""
        self._owed += num_steps / TRIAL_SHARE

    def note_paid(self) -> None:
        """Reset the intervals between trials, because drafts pay off."""
        self._num_silent = self._num_left = 0
        self._wait, self._owed = TRY_AFTER, 0.0
