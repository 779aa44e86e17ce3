"""Decides how many drafts pay off, from measured step times and acceptance rates.

A step yields one token per request and one more per accepted draft, but takes longer with more
drafts. The number of drafts that gives most tokens per second is chosen; 0 if drafts do not pay
off. Refuses to know: requests' tokens, the proposer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

YES: Callable[[], bool] = lambda: True  # noqa: E731
# From this many samples of a size on, their median is used; before, their minimum, because the
# first steps of a size compile.
_ENOUGH = 5
TRIED = 3  # samples until a size's cost is known
# A measured time is used for `_FRESH` steps. If other sizes seem faster by less than `_MUCH` times,
# maybe by chance, it is measured again after `_FRESH_IF_LITTLE` steps.
_FRESH, _FRESH_IF_LITTLE, _MUCH = 256, 48, 1.3
_SAMPLES = 5  # latest samples kept per size; their median ignores disturbances by other programs
_FORGET_AFTER = 2000  # steps until a size's old samples are dropped
_MEMORY = 0.93  # decay of a request's acceptance, per checked draft
_MEMORY_OF_ALL = 0.99  # decay of all requests' acceptance, per checked draft
_PRIOR_WEIGHT = 2.0  # in a request's rate, all requests' rate counts like this many drafts
_FIRST_PRIOR = 0.7
_FIRST_TRIED = 8  # first steps with drafts, which record tapes; their times are ignored
TRY_AFTER = 512  # steps without drafts until a trial; doubles each time
TRY_AT_LEAST = 8192  # maximum number of steps without drafts before a trial
TRIAL_SHARE = 0.005  # largest share of all time that trials may take
# Least gain in tokens per second that pays for drafts. Smaller gains are within noise, and requests
# that finish early leave smaller batches.
_MARGIN = 1.1


class StepCosts:
    """Measured seconds of decode-only steps, by number of tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._noted_at: dict[int, deque[int]] = {}
        self._num_noted = 0
        # Typical seconds by size, ascending; sizes measured too rarely count only if there are no
        # others.
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
            gain: tokens per second of other sizes, as a multiple of this size's.
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
        """Return the seconds of steps with each of these numbers of tokens (ascending).

        Interpolates linearly between measured sizes. Beyond the largest one, extends the line from
        the smallest to the largest; with one measured size, assumes equal times, so that other
        sizes are tried and then measured. ``num_tokens[0]`` is near the size in use.
        """
        sizes, costs = list(self._typical), np.array(list(self._typical.values()))
        if not sizes:
            return np.ones(len(num_tokens))
        # A larger step cannot be faster, so the smaller step was measured in a slow moment.
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
        self._costs: dict[int, StepCosts] = {}  # by number of drafts
        self._num_noted = 0

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record the time of making ``num_drafts`` drafts for each of ``num_rows`` requests."""
        self._num_noted += 1
        self._costs.setdefault(num_drafts, StepCosts()).note(num_rows, seconds)

    def seconds(self, num_rows: int, most: int) -> NDArray[np.float64]:
        """Return the seconds of making 0, 1, ..., ``most`` drafts: ``[most + 1]``.

        A number of drafts costs at most as much as any larger measured number, and at most in
        proportion to any smaller one, because the first draft is the most expensive. So a number of
        drafts whose time was measured in a slow moment, or before a tape was recorded, is tried
        again. All costs are 0 at first, so that drafts are tried.
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
    """Round a number of tokens: up to 16 exactly, then to one of eight sizes per doubling."""
    step = 1 << max(num_tokens.bit_length() - 4, 0)
    return (num_tokens + step // 2) // step * step


class Acceptance:
    """The rate at which drafts are accepted, of one request or of all."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._right = self._looked_at = 0.0

    @classmethod
    def of_all(cls) -> Acceptance:
        """Make the acceptance rate of all requests, which decays more slowly."""
        return cls(_MEMORY_OF_ALL)

    def note(self, is_right: bool) -> None:
        """Count a checked draft; drafts after a wrong draft are not checked."""
        self._right = self._right * self._memory + is_right
        self._looked_at = self._looked_at * self._memory + 1

    def rate(self, prior: float = _FIRST_PRIOR) -> float:
        """Return the chance that a draft is right if earlier drafts are; ``prior`` without data."""
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
    # the order: a request's earlier drafts before its later ones
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
    """A decision on the number of drafts, with its reasons.

    Attributes:
        num_drafts: drafts to verify, over all requests of the step.
        num_possible: available drafts, over all requests of the step.
        num_rows: requests in the step.
        rate: mean acceptance rate of the requests with drafts.
        step_s: seconds of a step without drafts, with the chosen drafts, and with all drafts.
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
    """Return how many drafts per request to make, if making drafts takes time, and the reasons.

    Args:
        num_rows: number of requests that continue.
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
    """Decides when to retry drafting after drafting stopped paying off, at growing intervals.

    Trials may take only a small share of all time, because a drafter with many unread tokens may
    take as long as many steps.
    """

    def __init__(self) -> None:
        self._num_silent = self._num_left = 0
        self._wait = TRY_AFTER
        self._owed = 0.0  # additional steps to wait, to pay for the latest trial

    @property
    def is_overdue(self) -> bool:
        """Return whether a trial is due and waits for a request that can get drafts."""
        return self._num_silent > max(self._wait, self._owed)

    def is_due(self, can_draft: Callable[[], bool] = YES) -> bool:
        """Return whether to make drafts as a trial, although they do not pay; call once per step.

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
        """Record the cost of a trial, in steps."""
        self._owed += num_steps / TRIAL_SHARE

    def note_paid(self) -> None:
        """Reset the intervals, because drafts pay off."""
        self._num_silent = self._num_left = 0
        self._wait, self._owed = TRY_AFTER, 0.0
