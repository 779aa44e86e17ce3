"""How many drafts pay: by what steps were measured to take, and how often drafts were right.

A step gives a token of each request and one more for each draft that is right; with more drafts it
takes longer. Chosen is what gives most tokens per second, which may be no draft at all. Refuses to
know: requests' tokens, who guesses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

YES: Callable[[], bool] = lambda: True  # noqa: E731
_ENOUGH = 5  # samples; of fewer the least counts: a size that is new is prepared for, once
TRIED = 3  # samples of a size, before which it counts as not known
# Steps in which a size must have been measured for others to be held against it: where they seem
# to give much more, and where a slow moment may have made them seem so.
_FRESH, _FRESH_IF_LITTLE, _MUCH = 256, 48, 1.3
_SAMPLES = 5  # latest ones of a size, whose median counts: a machine has other things to do
_FORGET_AFTER = 2000  # steps; then a size is tried again, should it look as if it could pay
_MEMORY = 0.93  # of a request's acceptance, per draft that was looked at
_MEMORY_OF_ALL = 0.99  # likewise of all requests' together
_PRIOR_WEIGHT = 2.0  # drafts that those of all requests count for in one request's
_FIRST_PRIOR = 0.7
_FIRST_TRIED = 8  # steps that guess before it counts what that takes: tapes are made in them
TRY_AFTER = 512  # steps in which nothing was guessed, for it did not pay; then twice as many
TRY_AT_LEAST = 8192  # ... and so on up to here
TRIAL_SHARE = 0.005  # of all time, that is guessed in then
# By how much more tokens per second drafts must give: less is within what steps' times vary by, and
# requests that get ahead of others leave these in smaller batches.
_MARGIN = 1.1


class StepCosts:
    """Seconds that a step of so many tokens takes, as far as steps were measured."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._noted_at: dict[int, deque[int]] = {}
        self._num_noted = 0
        # Typical seconds by size, rising: of sizes that are known, or where none is, of all.
        self._typical: dict[int, float] = {}
        self._num_known = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that only decoded took so long."""
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
        """Whether steps of so many tokens were measured often enough, and not long ago.

        Args:
            gain: how many times as many tokens per second other steps seem to give.
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
        """Of steps of so many tokens, rising numbers; the first is about what is being computed.

        Between sizes that are known: a line. Beyond the largest: the line from the smallest to
        there, or, where one size alone is known, the same: what is not known is tried, and is
        known then.
        """
        sizes, costs = list(self._typical), np.array(list(self._typical.values()))
        if not sizes:
            return np.ones(len(num_tokens))
        # No step takes longer than a larger one: where it seems so, its moments were slow ones.
        costs = np.minimum.accumulate(costs[::-1])[::-1]
        found: NDArray[np.float64] = np.interp(num_tokens, sizes, costs)
        if len(sizes) > 1:
            slope = float(costs[-1] - costs[0]) / (sizes[-1] - sizes[0])
            found = found + slope * np.maximum(num_tokens - sizes[-1], 0)
        return found


def _of(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2] if len(samples) >= _ENOUGH else min(samples)


class DraftingCosts:
    """Seconds in which so many drafts of so many requests are guessed, as far as was measured."""

    def __init__(self) -> None:
        self._costs: dict[int, StepCosts] = {}  # by number of drafts
        self._num_noted = 0

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step guessed so many drafts behind each of its requests, and took so long for it."""
        self._num_noted += 1
        self._costs.setdefault(num_drafts, StepCosts()).note(num_rows, seconds)

    def seconds(self, num_rows: int, most: int) -> NDArray[np.float64]:
        """Of no draft, one, and so on to ``most``: ``[most + 1]``.

        At most what more of them took, or in proportion what fewer took, as the first draft takes
        longest: what is new is read for it. So what was measured in a slow moment, or before there
        was a tape for it, is tried again. None at first: so they are tried.
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
    """Itself up to 16, then to the nearest of eight per doubling."""
    step = 1 << max(num_tokens.bit_length() - 4, 0)
    return (num_tokens + step // 2) // step * step


class Acceptance:
    """How often drafts are right: one request's, or all requests'."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self._memory = memory
        self._right = self._looked_at = 0.0

    @classmethod
    def of_all(cls) -> Acceptance:
        """Make one of all requests."""
        return cls(_MEMORY_OF_ALL)

    def note(self, is_right: bool) -> None:
        """A draft was looked at; those behind a wrong one are not."""
        self._right = self._right * self._memory + is_right
        self._looked_at = self._looked_at * self._memory + 1

    def rate(self, prior: float = _FIRST_PRIOR) -> float:
        """Chance that a draft is right if all before it are; ``prior`` where little is known."""
        rate = (self._right + _PRIOR_WEIGHT * prior) / (self._looked_at + _PRIOR_WEIGHT)
        return min(rate, 0.99)


def choose_lengths(
    costs: StepCosts, num_rows: int, num_drafts: Sequence[int], rates: Sequence[float]
) -> tuple[list[int], Choice]:
    """How many drafts of each request the next step should compute, and why.

    Args:
        num_rows: requests that it computes, those without drafts included.
        num_drafts: that there are, by request.
        rates: see `Acceptance.rate`, by request.
    """
    requests = np.repeat(np.arange(len(num_drafts)), num_drafts)
    places = np.concatenate([np.arange(1, num + 1) for num in num_drafts])
    chances = np.asarray(rates)[requests] ** places
    order = np.argsort(-chances, kind="stable")  # of one request, earlier drafts come first
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
    """How many drafts were found to pay, and by what.

    Attributes:
        num_drafts: in the step, of all its requests.
        num_possible: that there were.
        num_rows: requests in the step.
        rate: see `Acceptance.rate`, the mean of those that had drafts.
        step_s: of a step with none of the drafts, with those chosen, and with all.
        gain: tokens per second with those chosen over those without any.
        drafting_s: of guessing them, where that takes time.
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
        guessing = f", guessing {1e3 * self.drafting_s:.3g} ms" if self.drafting_s else ""
        return (
            f"{self.num_drafts} of {self.num_possible} guesses paid in a step of {self.num_rows} "
            f"requests: {self.rate:.0%} are right; steps with none, these and all of them take "
            f"{none}, {chosen} and {most} ms{guessing}"
        )


def choose_num_drafts(
    costs: StepCosts, drafting: DraftingCosts, num_rows: int, most: int, rate: float
) -> tuple[int, Choice]:
    """How many drafts to guess behind each request, where guessing takes time, too; and why.

    Args:
        num_rows: requests that go on.
        most: drafts that may be asked for.
        rate: see `Acceptance.rate`, of all requests.
    """
    numbers = np.arange(most + 1)
    tokens = np.cumsum(rate**numbers)
    seconds = costs.seconds(num_rows * (1 + numbers))
    guessing = drafting.seconds(num_rows, most)
    speed = tokens / (seconds + guessing)
    best = int(np.argmax(speed))
    if speed[best] < _MARGIN * speed[0]:
        best = 0
    step_s = (float(seconds[0]), float(seconds[best]), float(seconds[-1]))
    possible = (num_rows * best, num_rows * most)
    gain = float(speed[best] / speed[0])
    return best, Choice(*possible, num_rows, rate, step_s, gain, float(guessing[best or most]))


class Trials:
    """When to guess although it does not pay, for what it is worth may change; ever more rarely.

    And so rarely that it takes little of all time: a drafter that reads what it has not read, of
    many requests, may take as long as many steps do.
    """

    def __init__(self) -> None:
        self._num_silent = self._num_left = 0
        self._wait = TRY_AFTER
        self._owed = 0.0  # steps to wait for what the latest trial took

    @property
    def is_overdue(self) -> bool:
        """Whether a trial waits for somebody to guess for."""
        return self._num_silent > max(self._wait, self._owed)

    def is_due(self, can_guess: Callable[[], bool] = YES) -> bool:
        """Whether a step in which guesses do not pay is to guess all the same; ask once a step.

        Args:
            can_guess: tells whether anybody that runs can be guessed for.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        self._num_silent += 1
        if not self.is_overdue or not can_guess():
            return False
        self._num_silent, self._num_left, self._owed = 0, TRIED - 1, 0.0
        self._wait = min(2 * self._wait, TRY_AT_LEAST)
        return True

    def note_cost(self, num_steps: float) -> None:
        """A step of a trial guessed for as long as so many steps take."""
        self._owed += num_steps / TRIAL_SHARE

    def note_paid(self) -> None:
        """Guesses pay."""
        self._num_silent = self._num_left = 0
        self._wait, self._owed = TRY_AFTER, 0.0
