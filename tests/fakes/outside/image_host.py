"""A host of images that misbehaves: redirects, endless bodies, lies about lengths, compression."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.fakes.outside.hostile_images import picture

PICTURE = picture("PNG", (28, 14))


class ImageHost:
    """Serve good and bad images on 127.0.0.1.

    Attributes:
        port: the server's port.
        paths: paths that were asked for.
        num_sent: bytes that the endless path sent.
    """

    def __init__(self) -> None:
        self.port = 0
        self.paths: list[str] = []
        self.num_sent = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ImageHost]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        yield self
        await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.paths.append(path)
        if path.startswith("/redirect/"):
            headers = {"Location": "http://169.254.169.254/latest/meta-data"}
            return web.Response(status=int(path.rpartition("/")[2]), headers=headers)
        if path.startswith("/status/"):
            return web.Response(status=int(path.rpartition("/")[2]), body=PICTURE)
        if path == "/gzip":
            body = gzip.compress(b"\0" * 2**24)
            return web.Response(body=body, headers={"Content-Encoding": "gzip"})
        if path == "/endless":
            return await self._endless(request)
        if path == "/slow":
            await asyncio.sleep(30)
        if path == "/large":
            return web.Response(body=b"\0" * 100_000)
        if path == "/empty":
            return web.Response(body=b"")
        if path == "/short":  # fewer bytes than promised
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(PICTURE[:100])
            assert request.transport is not None
            request.transport.abort()
            return response
        if path == "/page":
            return web.Response(text="<html>", content_type="image/png")
        return web.Response(body=PICTURE, content_type="image/png")

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:
            await response.write(b"\0" * 1_000)
            self.num_sent += 1_000
