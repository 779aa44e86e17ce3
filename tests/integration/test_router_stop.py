"""Tests of a router that is told to stop: over both APIs every client is told, and it ends soon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient, SamplingParams
from baton.api.errors import NodeUnavailableError
from baton.processes.free_address import free_address
from sim_node.cluster import SimCluster
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
SOME = SamplingParams(max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=1, ignore_eos=True)
WHY = "the router is stopping"
ERROR = {"message": WHY, "type": "service_unavailable_error", "param": None}
STOPPING = json.dumps({"error": {**ERROR, "code": "server_is_overloaded"}}, separators=(",", ":"))


async def over_grpc(address: str, begun: set[str], name: str, *, resumable: bool) -> None:
    async def read() -> None:
        async for _ in client.stream([1, 2], LONG, resumable=resumable):
            begun.add(name)

    async with AsyncClient(address) as client:
        with pytest.raises(NodeUnavailableError, match=WHY) as stopped:
            await read()
        assert stopped.value.retry_delay_s is not None


async def finish_over_grpc(address: str, begun: set[str], params: SamplingParams) -> int:
    """How many tokens came."""
    num_tokens = 0
    async with AsyncClient(address) as client:
        async for delta in client.stream([1, 2], params):
            begun.add("this")
            num_tokens += len(delta.token_ids)
    return num_tokens


async def health_of(address: str) -> str:
    """Return the answer of gRPC's health service."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def over_http(address: str, params: SamplingParams, *, stream: bool) -> tuple[int, str]:
    body = {
        "model": str(DEMO_MODEL),
        "prompt": [1, 2],
        "max_tokens": params.max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"http://{address}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.text()


@dataclass(frozen=True, slots=True)
class Router:
    """A router process and where it listens."""

    process: subprocess.Popen[bytes]
    address: str
    http_address: str

    def nodes(self) -> SimCluster:
        """A prefill and a decode node of it."""
        return SimCluster(
            self.address,
            str(DEMO_MODEL),
            num_prefill=1,
            num_decode=1,
            join_timeout_s=READY_TIMEOUT_S,
        )

    def assert_ends(self, code: int = 0, *, within_s: float = 20) -> None:
        assert self.process.wait(timeout=within_s) == code


@contextlib.contextmanager
def router(*options: str) -> Iterator[Router]:
    """One with these options, killed in the end."""
    address, http_address = free_address(), free_address()
    command = [sys.executable, "-m", "baton", "router", "--model", str(DEMO_MODEL)]
    listens = ["--listen", address, "--http-listen", http_address]
    process = subprocess.Popen([*command, *listens, *options], stderr=subprocess.DEVNULL)
    try:
        yield Router(process, address, http_address)
    finally:
        process.kill()
        process.wait()


async def get(session: aiohttp.ClientSession, address: str, path: str) -> tuple[int, str]:
    """Status and text, from a connection of its own."""
    headers = {"Connection": "close"}
    async with session.get(f"http://{address}{path}", headers=headers) as response:
        return response.status, await response.text()


async def until_begun(begun: set[str], number: int) -> None:
    while len(begun) < number:  # noqa: ASYNC110 - what it waits for sets no event
        await asyncio.sleep(0.01)


def test_all_clients_are_told_that_the_router_stops() -> None:

    async def run(one: Router) -> None:
        begun: set[str] = set()
        async with asyncio.timeout(60), one.nodes():
            calls = [
                asyncio.create_task(over_grpc(one.address, begun, "usual", resumable=False)),
                asyncio.create_task(over_grpc(one.address, begun, "resumable", resumable=True)),
            ]
            replies = [
                asyncio.create_task(over_http(one.http_address, LONG, stream=stream))
                for stream in (True, False)
            ]
            await until_begun(begun, 2)
            one.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*calls)
            (events_status, events), (status, text) = await asyncio.gather(*replies)
            assert events_status == 200
            assert WHY in events.rstrip().splitlines()[-1]
            assert status == 503
            assert WHY in text

    with router("--drain-timeout-s", "1") as one:
        asyncio.run(run(one))
        one.assert_ends(within_s=10)


def test_a_router_serves_on_while_it_says_that_it_is_not_ready_and_finishes_what_is_open() -> None:
    async def run(one: Router) -> None:
        begun: set[str] = set()
        async with asyncio.timeout(90), aiohttp.ClientSession() as session, one.nodes():
            # The router is ready only after it has read a first chat and a first schema.
            while (await get(session, one.http_address, "/ready"))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            open_over_http = asyncio.create_task(over_http(one.http_address, SOME, stream=True))
            open_over_grpc = asyncio.create_task(finish_over_grpc(one.address, begun, SOME))
            await until_begun(begun, 1)
            one.process.send_signal(signal.SIGTERM)
            # First phase: not ready over either API, and yet new requests are served.
            while (await get(session, one.http_address, "/ready"))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert await get(session, one.http_address, "/ready") == (503, STOPPING)
            assert (await get(session, one.http_address, "/health"))[0] == 200
            assert await health_of(one.address) == "NOT_SERVING"
            assert (await over_http(one.http_address, SHORT, stream=False))[0] == 200
            # Second phase: new ones are refused, over both; what is open goes on.
            status = 200
            while status == 200:
                status, text = await over_http(one.http_address, SHORT, stream=False)
                await asyncio.sleep(0.05)
            assert (status, WHY in text) == (503, True)
            async with AsyncClient(one.address) as client:
                with pytest.raises(NodeUnavailableError, match=WHY) as refused:
                    await client.generate([1, 2], SHORT)
                assert refused.value.retry_delay_s is not None
            assert (await get(session, one.http_address, "/health"))[0] == 200
            assert not open_over_http.done()
            assert not open_over_grpc.done()
            # They end as if nothing were.
            status, events = await open_over_http
            assert (status, events.rstrip().splitlines()[-1]) == (200, "data: [DONE]")
            assert await open_over_grpc == SOME.max_tokens

    with router("--drain-delay-s", "3", "--drain-timeout-s", "60") as one:
        asyncio.run(run(one))
        one.assert_ends()


def test_a_refused_request_says_when_to_come_again_and_closes_its_connection() -> None:
    async def run(one: Router) -> None:
        begun: set[str] = set()
        async with asyncio.timeout(60), aiohttp.ClientSession() as session, one.nodes():
            is_open = asyncio.create_task(finish_over_grpc(one.address, begun, SOME))
            await until_begun(begun, 1)
            one.process.send_signal(signal.SIGTERM)
            body = {"model": str(DEMO_MODEL), "prompt": [1, 2], "max_tokens": 1}
            url, status = f"http://{one.http_address}/v1/completions", 200
            while status == 200:
                async with session.post(url, json=body) as response:
                    status, headers = response.status, response.headers
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert headers["Connection"] == "close"
            one.process.send_signal(signal.SIGINT)  # the second: now
            one.assert_ends(130, within_s=20)
            with pytest.raises(NodeUnavailableError):
                await is_open

    with router("--drain-timeout-s", "60") as one:
        asyncio.run(run(one))


def test_a_router_without_open_requests_ends_at_once() -> None:
    async def run(one: Router) -> None:
        async with asyncio.timeout(60), one.nodes():
            one.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(one.assert_ends, within_s=10)

    with router("--drain-timeout-s", "60") as one:
        asyncio.run(run(one))
