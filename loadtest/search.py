"""Searches the highest rate at which a server keeps an SLO, and its uncertainty.

The rate is bracketed between a rate that held and a rate that failed; then the bracket is bisected.
The whole search is repeated with other requests, because one search gives a bracket but not its
error. Each repeat tries other rates: on a common grid, repeats would end at the same rates and only
seem to agree.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.api.errors import ConfigError
from loadtest.plan import LoadPlan, OpenLoop, Search
from loadtest.report.confidence import Interval, bracket_interval, mean_interval
from loadtest.steps import OnStep, Play, Step, with_load

MAX_TRIALS = 40
_MAX_FACTOR = 2.0
_GIVE_UP_AT = 1e-3  # lowest rate to try, as a fraction of the search's first rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        steps: all runs of the search in order; each step's ``value`` is its rate.
        brackets: for each complete repeat, the highest rate that held (0: none did), and the lowest
            rate above this rate that failed. The wanted rate is between both.
        max_rate_per_s: mean of the highest rates that held, with an interval that covers the
            brackets; None: no repeat is complete.
        goodput_per_s: mean goodput at the highest rates that held; 0 in a repeat in which none did.
        highest: for each complete repeat, the step at the highest rate that held; None: no rate
            held.
    """

    search: Search
    steps: list[Step]
    brackets: list[tuple[float, float]]
    max_rate_per_s: Interval | None
    goodput_per_s: Interval | None
    highest: list[Step | None]
    was_stopped: bool

    @property
    def holds_some(self) -> bool:
        return any(step is not None for step in self.highest)


class _StoppedError(Exception):
    """Raised when the search was stopped from outside."""


class _SilentError(Exception):
    """Raised when the rate is so low that no request was scheduled in the measured window."""


async def find_highest(
    holds: Callable[[float], Awaitable[bool]],
    start: float,
    factor: float,
    precision: float,
    least: float,
) -> tuple[float, float]:
    """Find the highest value that holds, and the lowest value above it that does not.

    Values that hold are assumed to be below all values that do not. The first result is 0 if no
    tried value holds; the second is infinity if all tried values hold.

    Args:
        start: first value to try.
        factor: factor from one value to the next, up or down; it grows until a holding and a
            failing value are found.
        least: lowest value to try.
    """
    value, low, high = start, 0.0, math.inf
    for _ in range(MAX_TRIALS):
        if await holds(value):
            low = value
        else:
            high = value
        if high <= low * (1 + precision) or (not low and high <= least):
            break
        if low and high < math.inf:
            value = math.sqrt(low * high)
            continue
        value = low * factor if low else max(high / factor, least)
        factor = min(factor**2, _MAX_FACTOR)
    return low, high


def check_search(plan: LoadPlan) -> OpenLoop:
    """Return the plan's open loop, at whose rate a search begins; raises ConfigError."""
    if not plan.slo.limits or not isinstance(plan.load, OpenLoop):
        raise ConfigError("find_max_goodput: needs --slo, and --rate to begin with")
    return plan.load


async def play_search(play: Play, plan: LoadPlan, search: Search, on_step: OnStep) -> SearchResult:
    """Play all repeats of the search; raises ConfigError."""
    load = check_search(plan)
    steps: list[Step] = []
    highest: list[Step | None] = []
    start, factor, least = load.rate_per_s, _MAX_FACTOR, load.rate_per_s * _GIVE_UP_AT
    chance = random.Random(f"{plan.seed} search")
    was_stopped = False

    async def holds(rate_per_s: float) -> bool:
        result = await play(with_load(plan, "rate", rate_per_s, len(steps)))
        attained = result.summary.attainment
        if attained is None and not result.was_stopped:
            if not steps:
                raise ConfigError(
                    "duration_s: no request came in the measured time; make it longer"
                )
            raise _SilentError
        held = attained is not None and attained >= search.attainment
        steps.append(Step(value=rate_per_s, result=result, repeat=repeat, held=held))
        on_step(steps[-1])
        if result.was_stopped:
            raise _StoppedError
        return held

    for repeat in range(search.repeats):
        try:
            await find_highest(holds, start, factor, search.precision, least)
        except _StoppedError:
            was_stopped = True
            break
        except _SilentError:
            # The steps are too short to judge lower rates
            least = min(step.value for step in steps)
        held = [step for step in steps if step.repeat == repeat and step.held]
        highest.append(max(held, key=lambda step: step.value, default=None))
        # The next repeat begins at this repeat's last rate: if again no rate holds, one try shows
        # this.
        found = highest[-1]
        factor = _MAX_FACTOR if found is None else min(1 + 2 * search.precision, _MAX_FACTOR)
        start = min(step.value for step in steps) if found is None else found.value
        if found is not None:  # the next repeat starts at a random rate near the found rate
            start *= (1 + search.precision) ** chance.uniform(-0.5, 0.5)
    brackets = [_bracket(steps, repeat) for repeat in range(len(highest))]
    goodputs = [
        0.0 if step is None else step.result.summary.goodput_per_s or 0.0 for step in highest
    ]
    return SearchResult(
        search=search,
        steps=steps,
        brackets=brackets,
        max_rate_per_s=bracket_interval(brackets) if brackets else None,
        goodput_per_s=mean_interval(goodputs) if goodputs else None,
        highest=highest,
        was_stopped=was_stopped,
    )


def _bracket(steps: Sequence[Step], repeat: int) -> tuple[float, float]:
    """Return the bracket of a repeat's steps; if the repeat has no steps, that of all steps."""
    tried = [step for step in steps if step.repeat == repeat] or steps
    low = max((step.value for step in tried if step.held), default=0.0)
    return low, min((step.value for step in tried if step.value > low), default=low)
