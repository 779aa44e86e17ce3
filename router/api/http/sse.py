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
    "X-Accel-Buffering": "no",  # otherwise nginx would hold events back in a buffer
}
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Sends events as a streamed response.

    The response begins with the first event, so an error before can still have its own HTTP status.

    Attributes:
        response: the response that the request's handler must return.
    """

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._encoder = msgspec.json.Encoder()

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: msgspec.Struct, *, kind: str = "") -> None:
        """Send an object as JSON; if the client reads slowly, wait until it has read.

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
        """Send an error as the last event, and end the response."""
        await self._write(b"data: " + error_body(error) + b"\n\n")
        await self.end_response()

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            await self.response.prepare(self._request)
        await self.response.write(data)
