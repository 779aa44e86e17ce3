"""FaultSpec: which faults to inject into a cluster of simulated nodes, and how often."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from baton.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """Which faults to inject, and how often; raises ConfigError if a value is out of range.

    Attributes:
        kill: number of kills per node and minute.
        restart_s: seconds until a killed node joins again, under a new engine id.
        stall: number of stalls (pauses) per node and minute.
        stall_s: duration of a stall in seconds.
        slow: share of nodes that are slow, from 0 to 1.
        slow_factor: factor by which everything takes longer on a slow node.
        refuse: probability that a node refuses a command.
        seed: seed of all random choices.
    """

    kill: float = 0.0
    restart_s: float = 3.0
    stall: float = 0.0
    stall_s: float = 2.0
    slow: float = 0.0
    slow_factor: float = 3.0
    refuse: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"faults: {field.name}: must be 0 or more, got {value!r}")
        for name in ("slow", "refuse"):
            if getattr(self, name) > 1:
                raise ConfigError(f"faults: {name}: must be 1 or less, got {getattr(self, name)!r}")
        if not self.slow_factor:
            raise ConfigError("faults: slow_factor: must be above 0, got 0")

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Parse text like ``kill=0.5,restart_s=2,refuse=0.01``; empty: no faults."""
        values: dict[str, float] = {}
        known = [field.name for field in dataclasses.fields(cls)]
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, number = part.partition("=")
            if name not in known:
                raise ConfigError(f"faults: must be among {', '.join(known)}, got {name!r}")
            try:
                values[name] = int(number) if name == "seed" else float(number)
            except ValueError:
                raise ConfigError(f"faults: {name}: must be a number, got {number!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # seed is an int
