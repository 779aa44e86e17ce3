"""RunningCalls: all calls that wait at the gate or run; `pass_gate` lets a call wait there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from baton.api.errors import InvalidRequestError
from router.calls.call import Call
from router.gate.admission import Admission
from router.gate.ticket import Ticket


class RunningCalls:
    """The calls that wait at the gate or run, by tenant and request id.

    Two tenants may use the same request id without seeing each other's calls.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}  # by `Call.scoped_id`

    def __len__(self) -> int:
        return len(self._calls)

    def add_call(self, call: Call) -> None:
        """Add a call; raises InvalidRequestError if its tenant has an open call with this id."""
        if call.scoped_id in self._calls:
            raise InvalidRequestError("request_id", f"{call.request_id!r} is in use")
        self._calls[call.scoped_id] = call

    def remove(self, call: Call) -> None:
        """Remove a call that has ended."""
        del self._calls[call.scoped_id]

    def ids(self) -> list[str]:
        """Return the scoped ids of all calls."""
        return list(self._calls)

    def count_adapter(self, digest: str) -> int:
        """Return the number of calls for an adapter.

        Takes time proportional to the number of calls, so it must not be called per request.
        """
        return sum(call.terms.adapter == digest for call in self._calls.values())

    def find(self, request_id: str, tenant: str | None = None) -> Call | None:
        """Return the tenant's call with this id, or None; ``tenant`` None: search all tenants.

        Raises InvalidRequestError if several tenants have a call with this id.
        """
        found = [
            call
            for call in self._calls.values()
            if call.request_id == request_id and tenant in (None, call.terms.principal.tenant)
        ]
        if len(found) > 1:
            names = ", ".join(sorted(call.terms.principal.tenant for call in found))
            raise InvalidRequestError(
                "tenant", f"must be given: {names} have a request {request_id!r} open"
            )
        return found[0] if found else None


@contextlib.asynccontextmanager
async def pass_gate(
    admission: Admission, call: Call, find_cached_tokens: Callable[[], int]
) -> AsyncIterator[tuple[Call, Ticket]]:
    """Wait until the gate admits a call; yield the call with the wait taken off its timeout.

    Args:
        find_cached_tokens: returns how many of the prompt's tokens are cached on some node.
    """
    async with admission.enter(
        request_id=call.scoped_id,
        num_prompt_tokens=len(call.prompt_token_ids),
        max_tokens=call.sampling_params.max_tokens,
        timeout_s=call.timeout_s,
        priority=call.terms.priority,
        principal=call.terms.principal,
        find_cached_tokens=find_cached_tokens,
        needs_decode=call.pooling is None,
    ) as ticket:
        left_s = call.timeout_s - ticket.waited_s
        admitted = dataclasses.replace(call, timeout_s=left_s, leaves_room=ticket.leaves_room)
        yield admitted, ticket
