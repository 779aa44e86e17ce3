"""RunningCalls: the calls of one router that wait or are in progress, by tenant and request id."""

from __future__ import annotations

from baton.errors import InvalidRequestError
from router.calls.call import Call


class RunningCalls:
    """Each tenant's request ids are its own: those of others neither block nor find anything."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}  # by `Call.scoped_id`

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Raises InvalidRequestError while its tenant has a request of that id."""
        if call.scoped_id in self._calls:
            raise InvalidRequestError("request_id", f"{call.request_id!r} is in use")
        self._calls[call.scoped_id] = call

    def remove(self, call: Call) -> None:
        """It has ended."""
        del self._calls[call.scoped_id]

    def ids(self) -> list[str]:
        """Of all, scoped."""
        return list(self._calls)

    def find(self, request_id: str, tenant: str | None = None) -> Call | None:
        """A tenant's call of that id; with None the only one that any tenant has.

        Raises InvalidRequestError when several have one.
        """
        found = [
            call
            for call in self._calls.values()
            if call.request_id == request_id and tenant in (None, call.principal.tenant)
        ]
        if len(found) > 1:
            names = ", ".join(sorted(call.principal.tenant for call in found))
            raise InvalidRequestError(
                "tenant", f"must be said: {names} have a request {request_id!r} open"
            )
        return found[0] if found else None
