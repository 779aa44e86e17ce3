"""Deployment: how many nodes of which role a deployment has, and the notation for it.

colocated:2   two nodes that both prefill (in chunks) and decode
1:1           a prefill node and a decode node; the decode node does not compute prompts
1:1+local     like 1:1, but the router may let the decode node compute a prompt
1:1+encode:1  like 1:1, with an encode node; 1:1+local+encode:1 is possible too
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.api.errors import ConfigError

NOTATION = "colocated:N, P:D, P:D+local or P:D+encode:E"
_SHAPE = re.compile(
    r"colocated:(?P<num>\d{1,4})"
    r"|(?P<p>\d{1,4}):(?P<d>\d{1,4})(?P<local>\+local)?(?:\+encode:(?P<e>\d{1,4}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The numbers of a deployment's nodes by role (the module's docstring shows the notation)."""

    name: str
    num_prefill: int
    num_decode: int
    num_encode: int
    is_local_allowed: bool

    @property
    def is_colocated(self) -> bool:
        return self.num_prefill == 0

    @classmethod
    def parse(cls, text: str) -> Deployment:
        """Parse a text in `NOTATION`; raises ConfigError."""
        match = _SHAPE.fullmatch(text)
        numbers = [int(one) for one in match.group("num", "p", "d", "e") if one] if match else [0]
        if match is None or min(numbers) < 1:
            raise ConfigError(f"deployments: must be {NOTATION}, got {text!r:.100}")
        is_colocated = match["num"] is not None
        return cls(
            name=text,
            num_prefill=0 if is_colocated else numbers[0],
            num_decode=numbers[0] if is_colocated else numbers[1],
            num_encode=int(match["e"] or 0),
            is_local_allowed=is_colocated or match["local"] is not None,
        )
