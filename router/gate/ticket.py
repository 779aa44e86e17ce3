"""Ticket: what the gate knows about one request. Only `Admission` and its queue change a ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.api.errors import BatonError
from baton.api.outputs import Receipt


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """Facts about one request that the gate knows.

    Attributes:
        request_id: the request's scoped id.
        tenant: the tenant in whose queue the request waits.
        weight: weight of the client's API key.
        order: (priority, arrival).
        place: virtual time at which the request begins among its tenant's; set by `FairQueue`. Of
            one tenant's requests, the one with the smallest (priority, place, arrival) is first.
        num_prompt_tokens: length of the prompt.
        num_kv_tokens: number of tokens whose KV the request is expected to hold.
        num_uncached_tokens: number of prompt tokens that must probably be computed.
        needs_decode: whether a decode node is needed, as for all but pooled requests.
        num_tokens_used: actual cost of the request in tokens; None until known.
        expires_at: the request's deadline, by the loop's clock.
        is_charged: whether the tenant was charged, because the request's turn came.
        leaves_room: whether the tenant must leave room to others.
        began_at: when the request began, by the loop's clock; None while it waits.
        has_first_token: whether the request has its first token, and so needs no prefill node.
        expected_wait_s: time to first token estimated at arrival; 0 if the request began at once.
        bias: correction factor that ``expected_wait_s`` contains.
        turn: future that is done when the wait is over; None if the request does not wait.
        refusal: error with which the wait was ended; None: the wait was not ended by an error.
    """

    request_id: str = ""
    tenant: str = ""
    weight: float = 1.0
    order: tuple[int, int]
    place: int = 0
    num_prompt_tokens: int
    num_kv_tokens: int
    num_uncached_tokens: int
    needs_decode: bool = True
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

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the sort key among the tenant's requests."""
        return self.order[0], self.place, self.order[1]

    @property
    def num_prompt_pairs(self) -> int:
        """Number of pairs of a prompt token and an earlier one, about half of the square."""
        return self.num_prompt_tokens**2 // 2

    @property
    def sign(self) -> int:
        """Return the sign of the priority: -1, 0 or 1."""
        return (self.order[0] > 0) - (self.order[0] < 0)

    def __lt__(self, other: Ticket) -> bool:
        return self.key < other.key

    @property
    def num_tokens(self) -> int:
        """Expected cost of the request: prompt tokens to compute plus output tokens."""
        return self.num_uncached_tokens + self.num_kv_tokens - self.num_prompt_tokens

    @property
    def charge(self) -> int:
        """Amount charged to the tenant when the request begins; see `charge_of`."""
        return charge_of(self.num_tokens, self.weight)

    @property
    def is_urgent(self) -> bool:
        """Return whether the priority is negative, so that the request precedes other tenants'."""
        return self.order[0] < 0

    @property
    def waited_s(self) -> float:
        return 0.0 if self.began_at is None else self.began_at - self.arrived_at

    @contextmanager
    def noting(self, receipt: Callable[[], Receipt]) -> Iterator[None]:
        """Set the request's actual cost from its receipt when this context ends."""
        try:
            yield
        finally:
            self.note_cost(receipt())

    def note_cost(self, receipt: Receipt) -> None:
        """Set the request's actual cost: prompt tokens computed for it plus its output tokens.

        If no node reported how many prompt tokens it computed, the expected number counts.
        """
        prefill, decode = receipt.prefill, receipt.decode
        num_computed = self.num_uncached_tokens
        if prefill is not None or decode is not None:
            num_computed = prefill.num_computed_tokens if prefill is not None else 0
            num_computed += decode.num_prompt_tokens_computed if decode is not None else 0
        # Work that is repeated after a failure is not charged.
        num_computed = min(num_computed, receipt.num_prompt_tokens)
        has_begun = receipt.num_attempts > 0
        self.num_tokens_used = num_computed + receipt.num_output_tokens if has_begun else 0


def charge_of(num_tokens: int, weight: float) -> int:
    """Return the charge for tokens: 1000 times their number divided by the tenant's weight."""
    return max(round(1000 * num_tokens / weight), 1)
