"""The chart's own commands, run: probes as the manifest says, load, and every pod replaced once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
from pathlib import Path

import aiohttp
import pytest

from baton.processes.child_processes import PYTHON_MODULE
from tests.deploy.conftest import Document, render
from tests.deploy.pods import Cluster, Pod, allowed_ports
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

logger = logging.getLogger(__name__)
# (Processes that import torch, one after the other, on a machine that may be busy.)
pytestmark = [pytest.mark.large, pytest.mark.timeout(1500)]

START_S = 600.0
KV_PORT = 7100
_SMALL = ["--dtype=float32", "--num-blocks=256"]
VALUES: Document = {
    "tls": {"source": "none"},  # as beside a mesh; certificates are tested with the programs
    "router": {"replicas": 2, "preStopSleepS": 1, "drainDelayS": 1, "args": ["--no-local-prefill"]},
    "prefill": {"replicas": 1, "args": _SMALL},
    "decode": {"replicas": 1, "args": _SMALL},
    "kv": {"port": KV_PORT},
}


def make_keys(folder: Path) -> tuple[str, str]:
    """A keys.toml, and the key of a client."""
    command = [*PYTHON_MODULE, "baton", "keys", "new", "client", "--role", "infer"]
    path = folder / "keys.toml"
    out = subprocess.check_output([*command, "--file", str(path)], text=True)
    return path.read_text(), next(word for word in out.split() if len(word) > 30)


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[Cluster, str]:
    documents = render(VALUES)
    keys, key = make_keys(tmp_path)
    secrets = {
        "baton-auth": {
            "keys.toml": keys, "node-token": "what nodes bring", "cache-salt": "s" * 32,
            "metrics-token": "m",
        }
    }  # fmt: skip
    own = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    own["OMP_NUM_THREADS"] = "1"
    return Cluster(tmp_path, documents, secrets, DEMO_MODEL, environment=own), key


class Service:
    """Sends each request to one of the routers that are ready, as its endpoints come and go."""

    def __init__(self, key: str) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        self.routers: list[Pod] = []  # that have not been told to end
        self._ready: list[Pod] = []
        self.num_answered = 0
        self.failures: list[str] = []
        self.dead: list[str] = []
        self._stopping = asyncio.Event()

    async def follow(self, pods: list[Pod]) -> None:
        """Probe as often as the manifest says, about; endpoints follow readiness."""
        while True:
            for pod in list(pods):
                if pod.process.poll() is None and not await asyncio.to_thread(_lives, pod):
                    self.dead.append(pod.name)
            ready = [pod for pod in list(self.routers) if await asyncio.to_thread(_ready, pod)]
            self._ready = [pod for pod in ready if pod in self.routers]
            await asyncio.sleep(0.3)

    async def load(self, num_clients: int) -> None:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            await asyncio.gather(*(self._ask(session, i) for i in range(num_clients)))

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "model", "prompt": "def add(a, b):\n" * (number + 1), "max_tokens": 12,
            "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        for turn in itertools.count(number):
            if self._stopping.is_set():
                return
            if not self._ready:
                await asyncio.sleep(0.1)
                continue
            pod = self._ready[turn % len(self._ready)]
            url = f"http://{pod.address}:8000/v1/completions"
            try:
                async with session.post(url, json=body) as answer:
                    if answer.status != 200:
                        self.failures.append(f"{answer.status}: {await answer.text()}")
                    elif (await answer.json())["usage"]["completion_tokens"] == 12:
                        self.num_answered += 1
            except aiohttp.ClientError as error:
                self.failures.append(repr(error))

    async def answers(self, count: int) -> None:
        goal = self.num_answered + count
        while self.num_answered < goal:  # of several tasks
            assert not self.failures, self.failures
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        self._stopping.set()


def _lives(pod: Pod) -> bool:
    return pod.is_alive


def _ready(pod: Pod) -> bool:
    return pod.probe("readiness")


async def _until_ready(pod: Pod) -> None:
    async with asyncio.timeout(START_S):
        while not await asyncio.to_thread(_ready, pod):
            assert pod.process.poll() is None, pod.log.read_text()
            await asyncio.sleep(0.2)


def test_every_pod_is_replaced_under_load_and_no_request_fails(
    cluster: tuple[Cluster, str],
) -> None:
    site, key = cluster
    service, pods = Service(key), list[Pod]()
    numbers = itertools.count()

    def begin(component: str) -> Pod:
        pod = Pod(site, component, f"baton-{component}-{next(numbers)}")
        pods.append(pod)
        pod.start(START_S)
        return pod

    async def replace(old: Pod) -> None:
        """Start a new pod, then end the old one, as a rolling update with surge does."""
        new = await asyncio.to_thread(begin, old.component)
        await _until_ready(new)
        if old.component == "router":
            service.routers.append(new)
            service.routers.remove(old)  # at once; load balancers hear of it meanwhile
        took_s = await asyncio.to_thread(old.end)
        pods.remove(old)
        logger.info("%s ended in %.1f s, of %d", old.name, took_s,
                    old.spec["terminationGracePeriodSeconds"])  # fmt: skip
        await service.answers(6)

    async def run() -> None:
        routers = [await asyncio.to_thread(begin, "router") for _ in range(2)]
        site.names["baton-router-nodes"] = [pod.address for pod in routers]
        prefill = await asyncio.to_thread(begin, "prefill")
        assert not prefill.probe("readiness"), "it reaches no decode node"
        assert not routers[0].probe("readiness"), "there is no pair"
        decode = await asyncio.to_thread(begin, "decode")
        for pod in (prefill, decode, *routers):
            await _until_ready(pod)
        service.routers += routers
        watching = asyncio.create_task(service.follow(pods))
        working = asyncio.create_task(service.load(3))
        await service.answers(6)
        for pod in (routers[0], prefill, decode):
            allowed = allowed_ports(site.documents, pod.component)
            assert pod.listening() == allowed, pod.name
        await replace(prefill)
        await replace(decode)
        # (Here the routers' name stands for those that there were at the nodes' start.)
        old = routers[0]
        service.routers.remove(old)
        await asyncio.to_thread(old.end)
        pods.remove(old)
        await service.answers(6)
        service.stop()
        await working
        watching.cancel()

    try:
        asyncio.run(run())
    finally:
        for pod in pods:
            pod.kill()
    logger.info("%d requests, %d failed", service.num_answered, len(service.failures))
    assert service.failures == []
    assert service.dead == []
    assert service.num_answered >= 24
