"""Slo: the latency limits that a good request keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.api.errors import ConfigError
from baton.options import LONGEST_S

LIMITED = ("ttft", "tpot", "gap", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of latencies in seconds, by name (see `LIMITED`).

    Goodput is requests per second that keep all limits (Zhong et al., DistServe, arXiv 2401.09670).
    """

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse ``ttft=0.5,tpot=0.05``; empty: no limits. Raises ConfigError."""
        limits: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, number = part.partition("=")
            try:
                limit = float(number)
            except ValueError:
                limit = 0.0
            if name not in LIMITED or name in limits or not 0 < limit <= LONGEST_S:
                raise ConfigError(
                    f"slo: must be like ttft=0.5,tpot=0.05 with seconds above 0, "
                    f"at most {LONGEST_S:g}, and names of "
                    f"{', '.join(LIMITED)}, got {text!r:.100}"
                )
            limits[name] = limit
        return cls(tuple(limits.items()))

    def is_kept(self, seconds: Mapping[str, float | None]) -> bool:
        """Return whether all latencies keep their limits; a missing latency (None) counts as 0."""
        return all((seconds[name] or 0.0) <= limit for name, limit in self.limits)

    def text(self) -> str:
        """Format as ``ttft 0.5 s, tpot 0.05 s``."""
        return ", ".join(f"{name} {limit:g} s" for name, limit in self.limits)


NO_SLO = Slo()
