"""Ticket: one request's way through admission. Its `Admission` writes, all others read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.api.errors import BatonError


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """What the gate knows of one request.

    Attributes:
        request_id: of the request.
        tenant: whose queue it waits in.
        weight: of its key.
        order: priority, smaller first, and arrival.
        num_prompt_tokens: of the request.
        num_kv_tokens: that it will come to hold, as far as one can tell.
        num_uncached_tokens: of its prompt, to be computed as far as one can tell.
        num_tokens_used: that it did cost; None while that is not known.
        expires_at: the request's deadline, by the loop's clock.
        is_charged: its tenant was charged with it: its turn came.
        leaves_room: its tenant had its part before the nodes, and others ask for theirs.
        began_at: None while it waits.
        has_first_token: it needs no prefill node any more.
        expected_wait_s: until its first token, when it came; 0 of one that begins at once.
        bias: that this was corrected by.
        turn: done when the wait is over; None when there is none.
        refusal: why it was taken out of the queue.
    """

    request_id: str = ""
    tenant: str = ""
    weight: float = 1.0
    order: tuple[int, int]
    num_prompt_tokens: int
    num_kv_tokens: int
    num_uncached_tokens: int
    num_tokens_used: int | None = None
    arrived_at: float
    expires_at: float
    expected_wait_s: float = 0.0
    bias: float = 1.0
    is_charged: bool = False
    leaves_room: bool = False
    began_at: float | None = None
    has_first_token: bool = False
    turn: asyncio.Future[None] | None = None
    refusal: BatonError | None = None

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order

    @property
    def num_tokens(self) -> int:
        """What it is expected to cost: prompt tokens to be computed, and output tokens."""
        return self.num_uncached_tokens + self.num_kv_tokens - self.num_prompt_tokens

    @property
    def charge(self) -> int:
        """What its tenant is charged when it begins."""
        return charge_of(self.num_tokens, self.weight)

    @property
    def is_urgent(self) -> bool:
        """Whether it goes before other tenants' requests."""
        return self.order[0] < 0

    @property
    def waited_s(self) -> float:
        return 0.0 if self.began_at is None else self.began_at - self.arrived_at


def charge_of(num_tokens: int, weight: float) -> int:
    """Thousandths of a token for a weight of 1: whole numbers, so that sums stay exact."""
    return max(round(1000 * num_tokens / weight), 1)
