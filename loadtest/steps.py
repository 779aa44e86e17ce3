"""Steps: a plan played with several loads, one after another. A sweep lists the loads.

Each step is a separate run with its own warm-up, window and prompts, because a server that has
cached the previous step's prompts would look better with every step. Refuses to know: searches,
reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.api.errors import ConfigError
from loadtest.plan import MAX_RATE_PER_S, MAX_USERS, ClosedLoop, LoadPlan, OpenLoop
from loadtest.run import RunResult

VARIABLES = ("rate", "concurrency")
MAX_STEPS = 100
Play = Callable[[LoadPlan], Awaitable[RunResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run of a sweep or search, with the value that the sweep or search varies.

    Attributes:
        value: requests per second, or number of users.
        repeat: number of the search's repeat to which the step belongs.
        held: in a search, whether enough requests of the step kept the SLO.
    """

    value: float
    result: RunResult
    repeat: int = 0
    held: bool | None = None


OnStep = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The loads of a sweep: a variable, and its values in order."""

    variable: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Parse ``rate=1,2,4`` or ``concurrency=1,8``; raises ConfigError."""
        variable, _, listed = text.partition("=")
        try:
            values = tuple(float(value) for value in listed.split(","))
        except ValueError:
            values = ()
        most = MAX_RATE_PER_S if variable == "rate" else MAX_USERS
        in_limits = 1 <= len(values) <= MAX_STEPS and all(0 < value <= most for value in values)
        is_whole = variable == "rate" or all(value.is_integer() for value in values)
        if variable not in VARIABLES or not in_limits or not is_whole:
            raise ConfigError(
                f"sweep: must be like rate=0.5,1,2 or concurrency=1,8,64 with 1 to {MAX_STEPS} "
                f"numbers above 0, at most {most:g}, got {text!r:.100}"
            )
        return cls(variable, values)


def with_load(plan: LoadPlan, variable: str, value: float, number: int) -> LoadPlan:
    """Return the plan of step ``number`` (from 0): ``plan`` with ``variable`` set to ``value``."""
    load = plan.load
    if variable == "rate":
        assert isinstance(load, OpenLoop)
        return dataclasses.replace(
            plan, load=dataclasses.replace(load, rate_per_s=value), round=number
        )
    assert isinstance(load, ClosedLoop)
    return dataclasses.replace(
        plan, load=dataclasses.replace(load, concurrency=int(value)), round=number
    )


async def play_sweep(play: Play, plan: LoadPlan, sweep: Sweep, on_step: OnStep) -> list[Step]:
    """Play all steps, up to a step that is stopped from outside; raises ConfigError."""
    steps: list[Step] = []
    for number, value in enumerate(sweep.values):
        result = await play(with_load(plan, sweep.variable, value, number))
        steps.append(Step(value=value, result=result))
        on_step(steps[-1])
        if result.was_stopped:
            break
    return steps
