"""Every option that takes a number has limits, which a one-line error names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from baton.api.errors import ConfigError
from baton.cli.config_file import PROGRAMS
from baton.cli.declared import by_name
from baton.options import LONGEST_S, Option
from router.config import RouterConfig


def numeric_options() -> Iterator[tuple[str, Option]]:
    """Yield the options of all programs whose values users write as numbers."""
    for program in PROGRAMS.names():
        for name, one in by_name(PROGRAMS.load(program)).items():
            kinds = {one.type, *get_args(one.type)}
            if one.declaration.parse is None and kinds & {int, float} and str not in kinds:
                yield f"{program} {name}", one


NUMBERS = dict(numeric_options())


def test_there_are_options() -> None:
    assert "router request_timeout_s" in NUMBERS
    assert len(NUMBERS) > 70


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_least_one(name: str) -> None:
    """Regression: a timeout of -1 s was accepted, and every request failed."""
    declaration = NUMBERS[name].declaration
    has_least = declaration.least is not None or declaration.above is not None
    assert has_least or declaration.choices, "declare least= or above="


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e300, 1e300, 10**400, -(10**9)])
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_is_held_against_its_limits(name: str, value: Any) -> None:
    problem = NUMBERS[name].declaration.problem(value)
    assert problem.startswith("must be ")
    assert len(problem) < 200


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, 1e300, LONGEST_S * 2])
@pytest.mark.parametrize("name", ["request_timeout_s", "max_request_timeout_s"])
def test_a_routers_timeout_is_checked(name: str, value: float) -> None:
    options: dict[str, Any] = {"model": "demo", name: value}
    with pytest.raises(ConfigError, match=f"^{name}: must be "):
        RouterConfig(**options)
