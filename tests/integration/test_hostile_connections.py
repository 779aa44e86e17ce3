"""Thousands of connections that send nothing or half of something, at every port at once: who
behaves is served as before, and when they are gone nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from baton import AsyncClient, SamplingParams
from baton.processes.free_address import free_address
from baton.processes.process import raise_descriptor_limit
from baton.serving.rpc import open_channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S

pytestmark = [pytest.mark.large, pytest.mark.nixl, pytest.mark.timeout(240)]

NUM_DESCRIPTORS = 1024  # of the router: what many systems give a process
# A request waits for the pair of nodes: what is open then is all that they need.
ROUTER_OPTIONS = ("--header-timeout-s", "3", "--idle-timeout-s", "6", "--no-local-prefill")
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
# A bound that tells waiting from being served; on an idle machine it is milliseconds.
SOON_S = 5.0


class Programs:
    """A router with few descriptors, and a pair of nodes of which one has a metrics page."""

    def __init__(self, folder: Path) -> None:
        self.grpc, self.http = free_address(), free_address()
        self._folder = folder
        listens = ["--listen", self.grpc, "--http-listen", self.http]
        self.router = self._start("router", *listens, *ROUTER_OPTIONS, few_descriptors=True)
        node = ["--router", self.grpc, "--num-threads", "1", "--dtype", "float32"]
        self.prefill = self._start("prefill", *node)
        self.decode = self._start("decode", *node, "--metrics-listen", "127.0.0.1:0")

    def _start(
        self, command: str, *options: str, few_descriptors: bool = False
    ) -> subprocess.Popen[bytes]:
        def lower() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))

        with (self._folder / f"{command}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "baton", command, "--model", str(DEMO_MODEL), *options],
                stderr=log,
                preexec_fn=lower if few_descriptors else None,
            )

    def log(self, command: str) -> str:
        return (self._folder / f"{command}.log").read_text(encoding="utf-8")

    @property
    def metrics(self) -> str:
        """Where the decode node's page is."""
        return str(re.findall(r"metrics at http://([^/]+)/", self.log("decode"))[-1])

    def kill(self) -> None:
        for process in (self.decode, self.prefill, self.router):
            process.kill()
            process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    try:
        yield programs
    finally:
        programs.kill()


async def until(condition: Callable[[], object], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.1)


def uses(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Descriptors and threads."""
    of_process = psutil.Process(process.pid)
    return of_process.num_fds(), of_process.num_threads()


@contextlib.asynccontextmanager
async def holding(address: str, data: bytes, number: int) -> AsyncIterator[None]:
    """Hold ``number`` connections open, each of which sends ``data`` and nothing more."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    for _ in range(number):
        with contextlib.suppress(OSError):  # refused: as good
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(data)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def ask(address: str, path: str = "/health") -> float:
    """Seconds until a page answered, over a new connection."""
    began_at = time.monotonic()
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as reply:
        assert reply.status == 200
        await reply.read()
    return time.monotonic() - began_at


async def complete(address: str) -> float:
    """Seconds of a request over HTTP."""
    began_at = time.monotonic()
    body = {"model": str(DEMO_MODEL), "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{address}/v1/completions", json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        assert (await reply.json())["usage"]["completion_tokens"] == 8
    return time.monotonic() - began_at


async def node_names(address: str) -> set[str]:
    """Nodes that are joined."""
    async with open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]  # generated
        listed = await stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=10)
    return {node.node_name for node in listed.nodes if node.HasField("beat")}


async def wait_ready(programs: Programs) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{programs.http}/ready") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)


def test_thousands_of_idle_and_half_open_connections_keep_nobody_out(programs: Programs) -> None:
    raise_descriptor_limit()  # of this process, which holds the other ends

    async def run() -> None:
        await wait_ready(programs)
        async with asyncio.timeout(READY_TIMEOUT_S):
            while len(names := await node_names(programs.grpc)) < 2:  # noqa: ASYNC110  # other process
                await asyncio.sleep(0.1)
        async with AsyncClient(programs.grpc) as client:
            await client.generate([1, 2, 3], SHORT)
            await complete(programs.http)
            await ask(programs.metrics, "/metrics")
            base = {process: uses(process) for process in (programs.router, programs.decode)}
            took_s = await attack(client)
            assert max(took_s) < SOON_S
            # What they held comes back, descriptors and threads.
            for process, (num_descriptors, num_threads) in base.items():
                await until(lambda: uses(process)[0] <= num_descriptors + 8, 30)  # noqa: B023
                assert uses(process)[1] <= num_threads + 4
            assert await node_names(programs.grpc) == names
        assert " lost" not in programs.log("router")
        assert "Traceback" not in programs.log("router") + programs.log("decode")

    async def attack(client: AsyncClient) -> list[float]:
        """Seconds that answers took meanwhile."""
        took_s: list[float] = []
        async with (
            holding(programs.http, b"", 2000),
            holding(programs.http, HALF, 500),
            holding(programs.grpc, b"", 250),
            holding(programs.grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 250),
            holding(programs.metrics, b"", 400),
        ):
            assert uses(programs.router)[0] < NUM_DESCRIPTORS
            threads = uses(programs.decode)[1]
            for _ in range(10):
                began_at = time.monotonic()
                assert len((await client.generate([1, 2, 3], SHORT)).token_ids) == 8
                took_s.append(time.monotonic() - began_at)
                took_s += [await ask(programs.http), await complete(programs.http)]
                took_s.append(await ask(programs.metrics, "/metrics"))
            assert uses(programs.decode)[1] <= threads + 2
        return took_s

    asyncio.run(run())
