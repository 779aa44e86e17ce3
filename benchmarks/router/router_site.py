"""Runs a router or a bare relay alone on a core, between nodes without engine and a client.

Refuses to know: what is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from baton.access.tls import NO_TLS, TlsOptions, channel_credentials, read_tls
from baton.api.sampling_params import SamplingParams
from baton.client.messages import make_request
from baton.processes.free_address import free_address
from baton.serving.rpc import open_channel, open_sync_channel
from baton.v1 import admin_pb2, inference_pb2
from benchmarks.router.router_cost_parts import RELAY_METHOD
from benchmarks.runner.environment import DEMO_MODEL, ROOT
from benchmarks.runner.own_process import own_environment
from benchmarks.runner.programs import admin_of

GENERATE = "/baton.v1.Inference/Generate"
ENDLESS = 2**20
PARTS = ("-m", "benchmarks", "--call")
PARTS_MODULE = "benchmarks.router.router_cost_parts"
WARM_UP_S = 1.0


@dataclass
class Site:
    """The ``measured`` router or relay, which is alone on core 0, and all other processes."""

    addresses: list[str]
    tls: TlsOptions = NO_TLS  # certificates for clients of the measured process
    measured: list[psutil.Process] = field(default_factory=list)

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.measured)

    def rss_mib(self) -> float:
        return sum(process.memory_info().rss for process in self.measured) / 2**20


@dataclass
class Client:
    """A client with several connections, which counts received tokens and messages."""

    address: str
    is_relay: bool
    tls: TlsOptions = NO_TLS
    num_channels: int = 4
    num_tokens: int = 0
    num_messages: int = 0
    num_begun: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def open(self) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        tls = read_tls(self.tls)
        if self.num_channels == 1:
            self.channels = [open_channel(self.address, tls)]
        elif tls is None:
            self.channels = [
                grpc.aio.insecure_channel(self.address, own) for _ in range(self.num_channels)
            ]
        else:
            self.channels = [
                grpc.aio.secure_channel(self.address, channel_credentials(tls), own)
                for _ in range(self.num_channels)
            ]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for channel in self.channels:
            await channel.close(None)

    async def begin(self, num_streams: int) -> None:
        """Start endless streams, and wait until each has received a token."""
        for number in range(num_streams):
            self.tasks.append(asyncio.create_task(self.stream(number, ENDLESS)))
            # gRPC's server drops calls when a thousand of them wait to be accepted.
            while number - self.num_begun >= 256:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with asyncio.timeout(180):
            while self.num_begun < num_streams:
                for task in self.tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def stream(self, number: int, max_tokens: int) -> None:
        channel = self.channels[number % len(self.channels)]
        if self.is_relay:
            call = channel.unary_stream(RELAY_METHOD, None, None)(b"")
        else:
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            request = make_request(list(range(5, 13)), params).SerializeToString()
            call = channel.unary_stream(GENERATE, None, None)(request)
        try:
            first = True
            async for message in call:
                self.num_messages += 1
                self.num_begun += first
                first = False
                self.num_tokens += self._count(message)
        finally:
            call.cancel()

    def _count(self, message: bytes) -> int:
        if self.is_relay:
            return 1
        return len(inference_pb2.GenerateResponse.FromString(message).token_ids)


def spawn(core: int, *command: str) -> subprocess.Popen[bytes]:
    # Without preexec_fn: it would make Popen fork this process, and gRPC's threads could then hang
    # for ever.
    pinned = ["taskset", "--cpu-list", str(core), sys.executable, *command]
    return subprocess.Popen(pinned, env=own_environment(), cwd=ROOT)


@contextlib.contextmanager
def running(commands: Sequence[tuple[int, Sequence[str]]]) -> Iterator[list[psutil.Process]]:
    processes = []
    try:
        for core, command in commands:
            processes.append(spawn(core, *command))
        yield [psutil.Process(process.pid) for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextlib.contextmanager
def router_site(
    model: Path,
    interval_s: float,
    num_processes: int = 1,
    tls: TlsOptions = NO_TLS,
    router_args: Sequence[str] = (),
) -> Iterator[Site]:
    """Run router processes on one public port, each with its own prefill and decode node.

    Args:
        router_args: additional options of the routers.
        tls: certificate that all programs use; `NO_TLS`: no TLS.
    """
    certificate = ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca] if tls else []
    listen, *links = (free_address() for _ in range(1 + num_processes))
    commands: list[tuple[int, Sequence[str]]] = []
    for link in links:
        options = ["--listen", listen, "--node-listen", link, "--http-listen", ""]
        options += ["--log-level", "warning", *certificate, *router_args]
        options += ["--tls-require-client-certs"] if tls else []
        command = ["-m", "baton", "router", "--model", str(model), *options]
        commands.append((0, [*command, *(["--reuse-port"] if num_processes > 1 else [])]))
    with running(commands) as routers:
        wait_for_port(listen, tls)
        for link in links:
            wait_for_port(link, tls)
        given = (",".join(links), str(model), str(interval_s), tls.cert, tls.key, tls.ca)
        nodes = [*PARTS, f"{PARTS_MODULE}:nodes", *given]
        with running([(1, nodes)]):
            for link in links:
                wait_for_pair(link, tls)
            yield Site([listen], tls, routers)


@contextlib.contextmanager
def relay_site(interval_s: float) -> Iterator[Site]:
    listen, backend = (free_address() for _ in range(2))
    serve = [*PARTS, f"{PARTS_MODULE}:backend", backend, str(interval_s)]
    pass_on = [*PARTS, f"{PARTS_MODULE}:relay", listen, backend]
    with running([(1, serve), (0, pass_on)]) as (_, relay):
        wait_for_port(listen)
        wait_for_port(backend)
        yield Site([listen], measured=[relay])


def wait_for_port(address: str, tls: TlsOptions = NO_TLS) -> None:
    with open_sync_channel(address, read_tls(tls)) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)


def wait_for_pair(router: str, tls: TlsOptions = NO_TLS) -> None:
    """Wait until the prefill node has reported that it is connected to the decode node."""
    with admin_of(router, tls) as admin:
        for _ in range(600):
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest()).nodes
            if any(peer.connected for node in nodes for peer in node.peers):
                return
            time.sleep(0.05)
    raise TimeoutError(f"no pair joined {router}")


# ---------------------------------------------------------------- what is measured


async def measure_rate(
    site: Site, *, is_relay: bool, num_streams: int, seconds: float
) -> dict[str, float]:
    """Return the CPU figures of the measured process while ``num_streams`` streams run."""
    num_channels = 8 if len(site.measured) > 1 else 4
    client = Client(site.addresses[0], is_relay, site.tls, num_channels)
    client.open()
    try:
        await client.begin(num_streams)
        await asyncio.sleep(WARM_UP_S)
        began, cpu_s = time.perf_counter(), site.cpu_s()
        num_tokens, num_messages = client.num_tokens, client.num_messages
        await asyncio.sleep(seconds)
        wall_s, cpu_s = time.perf_counter() - began, site.cpu_s() - cpu_s
        num_tokens, num_messages = (
            client.num_tokens - num_tokens,
            client.num_messages - num_messages,
        )
    finally:
        await client.close()
    return {
        "tokens_per_s": round(num_tokens / wall_s),
        "tokens_per_core_s": round(num_tokens / cpu_s),
        "cpu_us_per_token": round(cpu_s / max(num_tokens, 1) * 1e6, 2),
        "cpu_us_per_message": round(cpu_s / max(num_messages, 1) * 1e6, 1),
        "tokens_per_message": round(num_tokens / max(num_messages, 1), 2),
        "cores": round(cpu_s / wall_s, 2),
    }


async def measure_requests(site: Site, *, num_requests: int, max_tokens: int) -> dict[str, object]:
    """Measure short requests, 64 at a time: CPU per request, and memory."""
    client = Client(site.addresses[0], is_relay=False, tls=site.tls)
    client.open()
    numbers = iter(range(num_requests))
    tenth = num_requests // 10
    memory_mib = [round(site.rss_mib(), 1)]

    async def work() -> None:
        for number in numbers:
            await client.stream(number, max_tokens)
            if number % tenth == tenth - 1:
                memory_mib.append(round(site.rss_mib(), 1))

    cpu_s, began = site.cpu_s(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(64)))
    cpu_s, wall_s = site.cpu_s() - cpu_s, time.perf_counter() - began
    await client.close()
    return {
        "num_requests": num_requests,
        "tokens_per_request": max_tokens,
        "requests_per_s": round(num_requests / wall_s, 1),
        "cpu_us_per_request": round(cpu_s / num_requests * 1e6),
        "memory_mib_per_tenth": memory_mib,
    }


async def measure_held(site: Site, num_streams: int) -> dict[str, float]:
    """Measure the cost of open streams on which almost nothing is sent."""
    client = Client(site.addresses[0], is_relay=False, tls=site.tls)
    client.open()
    before = site.rss_mib()
    try:
        await client.begin(num_streams)
        mib = site.rss_mib() - before
        cpu_s = site.cpu_s()
        await asyncio.sleep(2)
        cpu_s = site.cpu_s() - cpu_s
        held = sum(not task.done() for task in client.tasks)
    finally:
        await client.close()
    return {
        "num_streams": held,
        "kib_per_stream": round(mib * 1024 / num_streams, 1),
        "cores_when_idle": round(cpu_s / 2, 3),
    }


async def in_turns(
    sites: Mapping[str, Site], slices: int, measure: Callable[[Site], Awaitable[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Measure short slices of the routers in turns; the others are idle meanwhile."""
    rows: list[dict[str, Any]] = []
    for number in range(-1, slices):  # the first slice of each warms up
        for name in list(sites)[:: 1 if number % 2 == 0 else -1]:
            row = {"subject": name, **await measure(sites[name])}
            if number >= 0:
                rows.append(row)
                print(row, flush=True)
    return rows


def ratios(
    rows: Sequence[Mapping[str, Any]], measure: str, ours: str, theirs: str
) -> dict[str, float]:
    """Divide slices of one router by those of another; return the median and the quartiles."""
    over, under = (
        [row[measure] for row in rows if row["subject"] == name] for name in (ours, theirs)
    )
    found = [one / other for one, other in zip(over, under, strict=True)]
    lower, median, upper = statistics.quantiles(found, n=4)
    return {"median": round(median, 3), "lower": round(lower, 3), "upper": round(upper, 3)}


def large_model(folder: Path) -> Path:
    """Write the demo model's config and tokenizer, with an enlarged maximum length.

    The maximum is so large that no stream reaches it during a measurement.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 2 * ENDLESS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
