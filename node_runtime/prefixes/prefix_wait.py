"""PrefixWait: how long one prompt waited for a cached prefix, and what came; for receipts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixWait:
    """The wait of one prompt.

    Attributes:
        num_tokens: tokens that the prompt's own fetch brought.
        is_lost: whether the prompt's own fetch was lost.
        waited_s: seconds from the start of the wait until the prompt went on; 0 before.
    """

    num_tokens: int = 0
    is_lost: bool = False
    waited_s: float = 0.0
