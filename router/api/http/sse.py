"""EventStream: a response as server-sent events, at the pace of its reader.

Source of the format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.api.errors import BatonError
from router.api.http.errors import ApiError, error_body

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # of nginx, which else collects events
}
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Begins with the first event, so that what fails before it has a status of its own.

    Attributes:
        response: what the request's handler returns.
    """

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._encoder = msgspec.json.Encoder()

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: msgspec.Struct, *, kind: str = "") -> None:
        """Send an object; waits while the client reads more slowly than we write.

        Args:
            kind: what the event is called; empty: nothing.

        Raises ConnectionError when the client is gone.
        """
        name = f"event: {kind}\n".encode() if kind else b""
        await self._write(name + b"data: " + self._encoder.encode(event) + b"\n\n")

    async def finish(self) -> None:
        """Say that this was all."""
        await self._write(_DONE)
        await self.end()

    async def end(self) -> None:
        """End where the last event says that it is the last."""
        await self.response.write_eof()

    async def fail(self, error: BatonError | ApiError) -> None:
        """Say that the stream ends early, and why."""
        await self._write(b"data: " + error_body(error) + b"\n\n")
        await self.end()

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            await self.response.prepare(self._request)
        await self.response.write(data)
