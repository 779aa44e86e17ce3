"""LengthDistribution: distributions of prompt and output lengths, and their notation in options."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from baton.api.errors import ConfigError
from loadtest.load.generate import Lengths

MAX_LENGTH = 2**24
NOTATION = "N, fixed:N, uniform:LEAST-MOST or lognormal:MEAN,SIGMA"


class LengthDistribution(Protocol):
    """A distribution of prompt or output lengths in tokens.

    Implementations are immutable, so that only the seed decides which lengths are drawn.
    """

    def draw(self, chance: random.Random) -> int:
        """Draw a number of tokens, which is at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """A uniform distribution: lengths from ``least`` to ``most`` are equally likely."""

    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.least, self.most)


def parse_lengths(option: str, text: str) -> LengthDistribution:
    """Parse a distribution (see `NOTATION`); raises ConfigError that names the option."""
    kind, separator, numbers = text.partition(":")
    if not separator:
        kind, numbers = "fixed", text
    try:
        if kind == "fixed":
            return Lengths(_checked(int(numbers)))
        if kind == "uniform":
            least, most = (_checked(int(number)) for number in numbers.split("-"))
            if least <= most:
                return UniformLengths(int(least), int(most))
        if kind == "lognormal":
            mean, sigma = (float(number) for number in numbers.split(","))
            if 0 <= sigma <= 4:
                return Lengths(_checked(mean), sigma)
    except ValueError:
        pass
    raise ConfigError(
        f"{option}: must be {NOTATION} with 1 to {MAX_LENGTH} tokens, got {text!r:.100}"
    )


def _checked(length: float) -> float:
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError("is outside the limits")
    return length
