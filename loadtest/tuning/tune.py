"""Coordinate search over settings: one setting after another, the others stay as they are.

Each value of a setting is tried once beside the best choice so far, and kept if its goodput exceeds
the best one by more than the noise. The search ends when a round over all settings keeps nothing,
or when the time is up (coordinate descent: Wright, Mathematical Programming 151, 2015). Repeats of
the defaults measure the noise. At the end, the best choice and the defaults are repeated in turns:
a single lucky trial must not win. Refuses to know: deployments, files.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from loadtest.report.confidence import Interval, mean_interval
from loadtest.tuning.settings import Choice, Setting, Value

NOISE_DEVIATIONS = 2.0  # standard deviations of the defaults' goodput that count as noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one run of a deployment with a choice of settings.

    Attributes:
        repeat: number of the run with this choice; see `round_of`.
        goodput_per_s: requests per second that kept the SLO; 0 if the deployment failed.
        attainment: share of the requests that kept the SLO.
        ttft_p99_s: 99th percentile of the time to the first token in seconds; None: no answer.
        itl_p99_s: 99th percentile of the time between tokens in seconds; None: no answer.
        error: why the deployment did not start or stay; empty: it did.
    """

    choice: dict[str, Value]
    repeat: int
    goodput_per_s: float
    attainment: float = 0.0
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    error: str = ""


Measure = Callable[[Choice, int], Awaitable[Trial]]


class StoppedError(Exception):
    """Raised by a `Measure` when the search was stopped from outside."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One value of a setting that was tried.

    Attributes:
        over: goodput minus the best goodput before this setting, in requests per second.
        is_kept: whether the value became a part of the best choice.
    """

    setting: str
    value: Value
    trial: Trial
    over: float
    is_kept: bool


@dataclass(slots=True)
class Tuning:
    """The result of a search.

    Attributes:
        noise: goodput, in requests per second, by which a value must exceed the best one.
        finals, rivals: trials of the best choice at the end, and the defaults' between them.
        gain: goodput of the best choice minus that of the defaults, repeated in turns; None: not
            measured.
        was_cut: whether the time was up before the search had ended.
    """

    defaults: list[Trial] = field(default_factory=list)
    noise: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    best: dict[str, Value] = field(default_factory=dict)
    finals: list[Trial] = field(default_factory=list)
    rivals: list[Trial] = field(default_factory=list)
    gain: Interval | None = None
    was_cut: bool = False

    @property
    def default_goodput(self) -> float:
        """Return the mean goodput of the defaults; 0 before any trial."""
        return statistics.fmean([one.goodput_per_s for one in self.defaults] or [0.0])

    @property
    def wins(self) -> bool:
        """Return whether the best choice beats the defaults by more than the noise."""
        gain = self.gain
        return gain is not None and gain.low is not None and gain.low > 0


async def tune(
    measure: Measure, settings: Sequence[Setting], repeats: int, has_time: Callable[[], bool]
) -> Tuning:
    """Search the best choice.

    Args:
        measure: runs one trial; raises StoppedError. The search asks for the
            same trials in the same order if it gets the same results, so it can be resumed.
        repeats: number of trials of the defaults, and of the best choice at the end; 2 or more.
        has_time: whether to try more values. The best choice is repeated even without time.
    """
    found = Tuning()
    try:
        for repeat in range(repeats):
            found.defaults.append(await measure({}, repeat))
        goodputs = [one.goodput_per_s for one in found.defaults]
        found.noise = NOISE_DEVIATIONS * statistics.stdev(goodputs)
        await _climb(measure, settings, found, has_time)
        if found.best:
            await _confirm(measure, found, repeats)
    except StoppedError:
        found.was_cut = True
    return found


async def _climb(
    measure: Measure,
    settings: Sequence[Setting],
    found: Tuning,
    has_time: Callable[[], bool],
) -> None:
    """Try the settings in turn, in rounds, until a round keeps no value."""
    best_goodput = found.default_goodput
    seen = {_key({})}
    is_better = True
    while is_better and not found.was_cut:
        is_better = False
        for setting in settings:
            base = dict(found.best)
            first, kept = best_goodput, len(found.tried)
            for value in setting.values:
                choice = {**base, setting.name: value}
                if _key(choice) in seen:
                    continue
                if not has_time():
                    found.was_cut = True
                    break
                seen.add(_key(choice))
                trial = await measure(choice, 0)
                over = trial.goodput_per_s - first
                beats = trial.goodput_per_s > max(best_goodput, first + found.noise)
                found.tried.append(Tried(setting.name, value, trial, over, beats))
                if beats:
                    best_goodput, found.best, is_better = trial.goodput_per_s, choice, True
            _keep_last_only(found.tried, kept)


def _keep_last_only(tried: list[Tried], first: int) -> None:
    """Mark only the last kept value of a setting as kept: it replaced those before it."""
    kept = [index for index in range(first, len(tried)) if tried[index].is_kept]
    for index in kept[:-1]:
        old = tried[index]
        tried[index] = Tried(old.setting, old.value, old.trial, old.over, is_kept=False)


async def _confirm(measure: Measure, found: Tuning, repeats: int) -> None:
    """Repeat the best choice and the defaults in turns with new requests; note the gain.

    The trials of the search are left out: the best choice was chosen because of them, perhaps by
    luck. A search that goes on and tries more values gets new repeats here, because the machine may
    have become faster or slower since the earlier ones.
    """
    first = repeats * (1 + len(found.tried))
    for repeat in range(first, first + repeats):
        found.rivals.append(await measure({}, repeat))
        found.finals.append(await measure(found.best, repeat))
    pairs = zip(found.finals, found.rivals, strict=True)
    differences = [one.goodput_per_s - other.goodput_per_s for one, other in pairs]
    found.gain = mean_interval(differences, least=None)


def round_of(repeat: int, repeats: int) -> int:
    """Return the round number, which decides the requests that a repeat sends.

    All trials of the search send the same requests, so that only settings and noise change their
    goodput. Each repeat at the end sends new requests.
    """
    return max(repeat - repeats + 1, 0)


def _key(choice: Choice) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in choice.items()))
