"""A router that is told to stop: every client hears it, over both APIs, and it ends soon."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import aiohttp
import pytest

from baton import AsyncClient, SamplingParams
from baton.errors import NodeUnavailableError
from sim_node.cluster import SimCluster
from tests.integration.conftest import DEMO_MODEL, READY_TIMEOUT_S, free_address

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
WHY = "the router is stopping"


async def over_grpc(address: str, begun: set[str], name: str, *, resumable: bool) -> None:
    async def read() -> None:
        async for _ in client.stream([1, 2], LONG, resumable=resumable):
            begun.add(name)

    async with AsyncClient(address) as client:
        with pytest.raises(NodeUnavailableError, match=WHY) as stopped:
            await read()
        assert stopped.value.retry_delay_s is not None


async def over_http(address: str, *, stream: bool) -> tuple[int, str]:
    body = {
        "model": str(DEMO_MODEL),
        "prompt": [1, 2],
        "max_tokens": LONG.max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"http://{address}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.text()


def test_all_clients_are_told_that_the_router_stops() -> None:
    address, http_address = free_address(), free_address()
    command = [sys.executable, "-m", "baton", "router", "--model", str(DEMO_MODEL)]
    process = subprocess.Popen(
        [*command, "--listen", address, "--http-listen", http_address], stderr=subprocess.DEVNULL
    )

    async def run() -> None:
        begun: set[str] = set()
        async with (
            asyncio.timeout(60),
            SimCluster(
                address,
                str(DEMO_MODEL),
                num_prefill=1,
                num_decode=1,
                join_timeout_s=READY_TIMEOUT_S,
            ),
        ):
            calls = [
                asyncio.create_task(over_grpc(address, begun, "usual", resumable=False)),
                asyncio.create_task(over_grpc(address, begun, "resumable", resumable=True)),
            ]
            replies = [
                asyncio.create_task(over_http(http_address, stream=stream))
                for stream in (True, False)
            ]
            while len(begun) < 2:  # noqa: ASYNC110 - what it waits for sets no event
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*calls)
            (events_status, events), (status, text) = await asyncio.gather(*replies)
            assert events_status == 200
            assert WHY in events.rstrip().splitlines()[-1]
            assert status == 503
            assert WHY in text

    try:
        asyncio.run(run())
        began = time.monotonic()
        assert process.wait(timeout=20) == 0
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
