"""Connections of the HTTPS API whose TLS handshake never ends, and a server's share of them."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from baton.access.tls import ServerContext, TlsFiles
from baton.serving.connection_limits import ConnectionLimits
from tests.fakes.network.certificates import Authority
from tests.fakes.router.http_scene import HttpScene, until

pytestmark = pytest.mark.medium

HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def test_a_handshake_that_does_not_end_has_a_limit_and_makes_way(tmp_path: Path) -> None:
    options = Authority(tmp_path).issue("router")
    limits = ConnectionLimits(max_connections=6, max_connections_per_address=6, header_timeout_s=3)

    async def run() -> None:
        scene = HttpScene(
            limits=limits, tls=ServerContext.of(TlsFiles(options), require_client_certs=False)
        )
        context = ssl.create_default_context(cafile=options.ca)
        async with asyncio.timeout(30), scene.running():
            host, _, port = scene.url.removeprefix("http://").rpartition(":")
            url = f"https://localhost:{port}/health"
            writers = []
            for data in [b"", HALF_A_HELLO] * 20:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                writers.append(writer)
            # More than there is room for: who comes with a request is served all the same.
            for _ in range(5):
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(url, ssl=context) as response,
                ):
                    assert await response.text() == "ok\n"
            counts = scene.server.connections
            assert counts.open <= 6
            assert counts.displaced >= 34
            assert counts.refused == 0
            # Those that are left are cut off in time, and nothing is kept of them.
            await until(lambda: counts.open == 0)
            for writer in writers:
                writer.close()

    asyncio.run(run())
