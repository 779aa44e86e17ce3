"""PrefixWait: how long a prompt waited for a cached prefix, and how many tokens it received."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixWait:
    """The wait of one prompt for a cached prefix; the request's receipt reports it.

    Attributes:
        num_tokens: number of tokens of the prefix that was received for this prompt.
        is_lost: whether the prefix that was requested for this prompt was lost.
        waited_s: seconds from the start of the wait to its end; 0 before the end.
    """

    num_tokens: int = 0
    is_lost: bool = False
    waited_s: float = 0.0
