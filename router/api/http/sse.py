"""EventStream: sends a response as server-sent events, no faster than the client reads.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.api.errors import BatonError
from router.api.http.errors import ApiError, error_body

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # stops nginx from buffering events
}
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Sends events. The first event begins the response; an error before has its own HTTP status.

    Attributes:
        response: the response for the request's handler to return.
    """

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._encoder = msgspec.json.Encoder()

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: msgspec.Struct, *, kind: str = "") -> None:
        """Send an object; wait while the client reads slowly.

        Args:
            kind: name of the event; empty: the event has no name.

        Raises ConnectionError if the client is gone.
        """
        name = f"event: {kind}\n".encode() if kind else b""
        await self._write(name + b"data: " + self._encoder.encode(event) + b"\n\n")

    async def end_with_mark(self) -> None:
        """Send OpenAI's end mark ``[DONE]``, and end the response."""
        await self._write(_DONE)
        await self.end_response()

    async def end_response(self) -> None:
        """End the response without OpenAI's end mark."""
        await self.response.write_eof()

    async def fail(self, error: BatonError | ApiError) -> None:
        """Send an error as the last event."""
        await self._write(b"data: " + error_body(error) + b"\n\n")
        await self.end_response()

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            await self.response.prepare(self._request)
        await self.response.write(data)
