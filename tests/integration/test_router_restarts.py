"""Tests that clients of a router that is killed and started again are never refused."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from baton import AsyncClient, SamplingParams
from baton.api.errors import BatonError
from baton.processes.free_address import free_address
from sim_node.cluster import SimCluster
from tests.fakes.checkpoints.demo_model import DEMO_MODEL
from tests.fakes.processes.deployments import READY_TIMEOUT_S

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
NUM_CLIENTS = 4  # over each API
NUM_KILLS = 2


class Router:
    """A router process that can be killed and started again at its addresses."""

    def __init__(self, *options: str) -> None:
        self.address, self.http_address = free_address(), free_address()
        self._command = [
            *(sys.executable, "-m", "baton", "router", "--model", str(DEMO_MODEL)),
            *("--listen", self.address, "--http-listen", self.http_address, *options),
        ]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.kill()
        self.process = self._start()


@contextlib.contextmanager
def running_router(*options: str) -> Iterator[Router]:
    router = Router(*options)
    try:
        yield router
    finally:
        router.kill()


class Clients:
    """Clients that send one request after another over both APIs.

    Attributes:
        num_served: answered requests by client, counted since `all_served` was last called.
        refusals: errors with which a router answered; failed connections are left out.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.num_served: Counter[str] = Counter()
        self.refusals: list[str] = []

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        names = [f"{api}{number}" for api in ("grpc", "http") for number in range(NUM_CLIENTS)]
        tasks = [asyncio.create_task(self._send_for_ever(name)) for name in names]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def all_served(self) -> None:
        """Wait until each client has had an answer to another three requests."""
        self.num_served.clear()
        while sum(count >= 3 for count in self.num_served.values()) < 2 * NUM_CLIENTS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _send_for_ever(self, name: str) -> None:
        send = self._send_grpc if name.startswith("grpc") else self._send_http
        while True:
            if await send():
                self.num_served[name] += 1
            else:
                await asyncio.sleep(0.01)

    async def _send_grpc(self) -> bool:
        async with AsyncClient(self._router.address) as client:
            try:
                await client.generate([1, 2], SHORT)
            except BatonError as error:
                if "joined" in str(error) or "nodes" in str(error):
                    self.refusals.append(str(error))
                return False
        return True

    async def _send_http(self) -> bool:
        body = {"model": str(DEMO_MODEL), "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
        url = f"http://{self._router.http_address}/v1/completions"
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                if response.status != 200:
                    self.refusals.append(f"{response.status}: {await response.text()}")
                    return False
        except aiohttp.ClientError:  # the router is away
            return False
        return True


@pytest.mark.parametrize("num_prefill", [1, 0])
def test_requests_wait_until_the_nodes_have_joined_the_new_router(num_prefill: int) -> None:
    """Regression: requests right after a restart failed with "no prefill node has joined"."""

    async def run() -> None:
        clients = Clients(router)
        nodes = SimCluster(
            router.address, str(DEMO_MODEL),
            num_prefill=num_prefill, num_decode=1, join_timeout_s=READY_TIMEOUT_S,
        )  # fmt: skip
        async with asyncio.timeout(100), nodes, clients.at_work():
            await clients.all_served()
            for _ in range(NUM_KILLS):
                await asyncio.to_thread(router.start_again)
                await clients.all_served()
        assert clients.refusals == []

    with running_router() as router:
        asyncio.run(run())


def test_without_nodes_a_client_gets_the_reason_after_the_grace() -> None:
    async def run() -> None:
        async with AsyncClient(router.address) as client:
            error = "connecting"
            while "joined" not in error:
                with pytest.raises(BatonError) as raised:
                    await client.generate([1, 2], SHORT)
                error = str(raised.value)
            assert "no prefill node has joined the router" in error

    with running_router("--join-grace-s", "0.5") as router:
        asyncio.run(asyncio.wait_for(run(), 60))
