"""Measure the hand-off between hosts whose links have a rate, from receipts of real requests.

A client, a router, a prefill node and a decode node run on hosts of their own, which are network
namespaces of this machine (Linux, root, iproute2). The links of both nodes have 1 Gbit/s, 10 Gbit/s
or no limit. KV travels by NIXL over TCP or by TLS sockets, while the prefill runs (layers) or after
it. One request at a time; the checkpoint is random and computes long prompts fast.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from baton import Client, Receipt
from baton.v1 import admin_pb2
from benchmarks.handoff.handoff_modes import PARAMS, make_checkpoint, push_figures
from benchmarks.runner.deployments import receipt_of
from benchmarks.runner.programs import admin_of
from benchmarks.runner.run import Run
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

HOSTS = ("client", "router", "p0", "d0")
CONNECTORS, PUSHES = ("nixl", "tls"), ("layers", "after-prefill")
LENGTHS = (1024, 4096, 16384)  # tokens
UNLIMITED = 0.0
RATES = (1.0, 10.0, UNLIMITED)  # Gbit/s
READY_TIMEOUT_S = 120.0
BITS = 8


@contextmanager
def running(network: Network, folder: Path, connector: str, push: str) -> Iterator[HostPrograms]:
    """Run the programs of one way to send KV; yield when the nodes have met, at full rate."""
    words = ["--kv-cache-memory", "256M", "--no-prefix-cache", "--kv-connector", connector]
    with HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill", model=folder)
        for name in ("p0", "d0"):
            listen = ["--kv-listen", network.at(name, 0)] if connector == "tls" else []
            own = ["--push", push] if name == "p0" else []
            programs.start_node(name, *words, *listen, *own, model=folder)
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while not _is_paired(programs.router):
            if programs.ended() or time.monotonic() > give_up_at:
                raise TimeoutError("\n".join(programs.log(n)[-2000:] for n in programs.processes))
            time.sleep(0.2)
        yield programs


def _is_paired(router: str) -> bool:
    try:
        with admin_of(router) as admin:
            nodes = admin.ListNodes(admin_pb2.ListNodesRequest(), timeout=5).nodes
    except grpc.RpcError:
        return False
    num_connected: int = sum(peer.connected for node in nodes for peer in node.peers)
    return num_connected == 2


def measure(
    network: Network, router: str, rate: float, length: int, num_requests: int
) -> list[Receipt]:
    """Send requests of one length over links with one rate; return their receipts."""
    for name in ("p0", "d0"):
        network.limit(name, rate * 1e9 or None)
    draw = random.Random(f"{rate} {length}")
    receipts = []
    with Client(router) as client:
        for _ in range(num_requests):
            prompt = draw.choices(range(2, 500), k=length)
            receipts.append(receipt_of(client, prompt, PARAMS)[0])
    return receipts


def figures(receipts: list[Receipt], rate: float, push: str) -> dict[str, Any]:
    """Return medians, and what the link allows.

    A link is a bottleneck only where it is slower than the prefill makes KV; what it cannot carry
    during the prefill is exposed.
    """
    found: dict[str, Any] = dict(push_figures(receipts))
    decode = receipts[0].decode
    assert decode is not None
    bits = found["num_bytes"] * BITS
    found["transport"] = decode.push.transport
    found["kv_made_gbit_per_s"] = round(bits / found["prefill_ms"] / 1e6, 3)
    sent_s = found["exposed_transfer_ms"] / 1e3
    if push == "after-prefill":
        found["gbit_per_s"] = round(bits / sent_s / 1e9, 3)
    if rate:
        link_ms = bits / rate / 1e6
        hidden_ms = found["prefill_ms"] if push == "layers" else 0.0
        found["least_exposed_ms"] = round(max(0.0, link_ms - hidden_ms), 2)
        if push == "after-prefill":
            found["share_of_link"] = round(link_ms / 1e3 / sent_s, 3)
    return found


def run(
    run: Run,
    requests: int = 5,
    lengths: Sequence[int] = LENGTHS,
    rates: Sequence[float] = RATES,
    connectors: Sequence[str] = CONNECTORS,
    pushes: Sequence[str] = PUSHES,
) -> dict[str, object] | None:
    """Measure each connector, push mode, rate and prompt length.

    Args:
        requests: number per length of 1,024 tokens; fewer for longer prompts.
        rates: Gbit/s of the nodes' links; 0: unlimited.
        connectors: nixl, tls.
        pushes: layers, after-prefill.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    table: dict[str, dict[str, Any]] = {}
    with Network(HOSTS) as network, tempfile.TemporaryDirectory() as path:
        folder = make_checkpoint(Path(path))
        # Called before gRPC has threads, because threads stay in the network where they begin
        network.enter("client")
        for connector in connectors:
            for push in pushes:
                with running(network, folder, connector, push) as programs:
                    measure(network, programs.router, UNLIMITED, min(lengths), 1)  # warms up
                    for rate in rates:
                        for length in lengths:
                            number = max(1, round(requests * min(1.0, 1024 / length)))
                            found = measure(network, programs.router, rate, length, number)
                            speed = f"{rate:g} Gbit/s" if rate else "unlimited"
                            name = f"{connector}, {push}, {speed}, {length} tokens"
                            table[name] = figures(found, rate, push)
                            print_row(name, table[name])
                for name in ("p0", "d0"):
                    network.limit(name, None)  # the next pair meets at full rate
    return {"rows": table}


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print the main figures of one row."""
    parts = [f"exposed {row['exposed_transfer_ms']:.2f} ms", f"prefill {row['prefill_ms']:.0f} ms"]
    if "least_exposed_ms" in row:
        parts.append(f"least exposed {row['least_exposed_ms']:.2f} ms")
    parts.append(f"KV made at {row['kv_made_gbit_per_s']:.2f} Gbit/s")
    if "gbit_per_s" in row:
        parts.append(f"sent at {row['gbit_per_s']:.2f} Gbit/s")
    if "share_of_link" in row:
        parts.append(f"share of the link {row['share_of_link']:.2f}")
    print(f"{name:44} | {' | '.join(parts)} | {row['transport']}", flush=True)
