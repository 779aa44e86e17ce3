"""Measure the hand-off between hosts whose links have a rate, from receipts of real requests.

A client, a router, a prefill node and a decode node run on hosts of their own, which are network
namespaces of this machine (Linux, root, iproute2). The links of both nodes have 1 Gbit/s, 10 Gbit/s
or no limit. KV is sent by NIXL over TCP or by TLS sockets, while the prefill runs (layers) or after
it. One request runs at a time; the checkpoint is random and computes long prompts fast.
`link_model.py` predicts each exposed transfer. On a slow link, KV in fp8 and digests are compared,
too. Then ends without engines fill the links (`full_link.py`) to show how long messages wait.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from baton import Client, Receipt
from baton.v1 import admin_pb2
from benchmarks.handoff.handoff_modes import PARAMS, make_checkpoint, push_figures
from benchmarks.hosts.full_link import SLOW, measure_full_links, measure_slow_neighbour
from benchmarks.hosts.link_model import BITS, Prefills, exposed_s, least_rate, push_queue
from benchmarks.runner.programs import admin_of, count_pairs, wait_until_ready
from benchmarks.runner.run import Document, Run
from tests.hosts.network import Network, why_no_hosts
from tests.hosts.programs import HostPrograms

HOSTS = ("client", "router", "p0", "d0", SLOW)
CONNECTORS, PUSHES = ("nixl", "tls"), ("layers", "after-prefill")
LENGTHS = (1024, 4096, 16384)  # tokens
Part = Literal["links", "table", "variants"]
PARTS: tuple[Part, ...] = ("links", "table", "variants")
UNLIMITED = 0.0
RATES = (1.0, 10.0, UNLIMITED)  # Gbit/s
WARM_TOKENS, NUM_WARM = 4096, 3  # requests after each change of the rate
# Least number of requests of one length whose KV is sent by layers, because the machine may pause
# during one of them
LEAST_REQUESTS = 3
SLOW_RATE = 0.1  # Gbit/s; slower than a prefill makes KV
# Ways to send fewer bytes, or to check the bytes, over the slow link
VARIANTS = {
    "no digests": ("--no-kv-digests",),
    "digests": ("--kv-digests",),
    "fp8": ("--kv-cache-dtype", "fp8", "--kv-digests"),
}
READY_TIMEOUT_S = 120.0


@contextmanager
def running(
    network: Network, folder: Path, connector: str, push: str, options: Sequence[str] = ()
) -> Iterator[HostPrograms]:
    """Run a router and two nodes with one connector and push mode; yield once they are connected.

    The links have the full rate while the nodes connect.
    """
    words = ["--kv-cache-memory", "256M", "--no-prefix-cache", "--kv-connector", connector]
    words += options
    with HostPrograms(network) as programs:
        programs.start_router("--no-local-prefill", model=folder)
        for name in ("p0", "d0"):
            listen = ["--kv-listen", network.at(name, 0)] if connector == "tls" else []
            own = ["--push", push] if name == "p0" else []
            programs.start_node(name, *words, *listen, *own, model=folder)
        wait_until_ready(programs, lambda: count_pairs(programs.router) == 1, READY_TIMEOUT_S)
        yield programs
    for name in ("p0", "d0"):
        network.limit(name, None)  # so that the next pair connects at the full rate


def measure(
    network: Network, router: str, rate: float, length: int, num_requests: int
) -> list[tuple[Receipt, float]]:
    """Send requests of one length over links with one rate.

    Returns each request's receipt, and the exposed transfer in milliseconds that the router
    expected when it chose the nodes.
    """
    for name in ("p0", "d0"):
        network.limit(name, rate * 1e9 or None)
    draw = random.Random(f"{rate} {length}")
    found = []
    with Client(router) as client, admin_of(router) as admin:
        for _ in range(num_requests):
            prompt = draw.choices(range(2, 500), k=length)
            request_id = uuid.uuid4().hex
            deltas = list(client.stream(prompt, PARAMS, request_id=request_id))
            [receipt] = [delta.receipt for delta in deltas if delta.receipt]
            question = admin_pb2.ExplainRequest(request_id=request_id)
            decision = admin.Explain(question, timeout=10).decisions[-1]
            terms = {term.name: term.value for term in decision.candidates[0].terms}
            found.append((receipt, terms["exposed_transfer_ms"]))
    return found


def figures(measured: Sequence[tuple[Receipt, float]], rate: float, push: str) -> dict[str, Any]:
    """Return medians over requests of one length, and the share of the link's rate."""
    receipts = [receipt for receipt, _ in measured]
    found: dict[str, Any] = dict(push_figures(receipts))
    found["expected_exposed_ms"] = round(statistics.median(ms for _, ms in measured), 2)
    prefill, decode = receipts[0].prefill, receipts[0].decode
    assert prefill is not None
    assert decode is not None
    bits = found["num_bytes"] * BITS
    found |= {
        "rate": rate,
        "push": push,
        "transport": decode.push.transport,
        "num_chunks": prefill.num_chunks,
        "kv_made_gbit_per_s": round(bits / found["prefill_ms"] / 1e6, 3),
    }
    if push == "after-prefill":
        found["gbit_per_s"] = round(bits / found["exposed_transfer_ms"] / 1e6, 3)
        if rate:
            found["share_of_link"] = round(found["gbit_per_s"] / rate, 3)
    return found


def predict(rows: Mapping[str, dict[str, Any]]) -> None:
    """Add the model's predictions to the rows of one connector, in milliseconds and Gbit/s.

    The model gets the times of the prefills. It also gets the shortest exposed transfer by layers
    over the unlimited link, as the time that a hand-off takes besides the link's time. Without rows
    of that link, nothing is predicted.
    """
    prefill_s = {
        row["num_chunks"]: row["prefill_ms"] / 1e3
        for row in rows.values()
        if row["push"] == "layers" and not row["rate"]
    }
    if not prefill_s:
        return
    prefills = Prefills.fit(prefill_s)
    besides_ms = min(
        row["exposed_transfer_ms"]
        for row in rows.values()
        if row["push"] == "layers" and not row["rate"]
    )
    for row in rows.values():
        queue = push_queue(prefills, row["num_chunks"], row["num_bytes"], row["push"])
        if row["push"] == "layers":
            row["least_gbit_per_s"] = round(least_rate(queue), 3)
        if row["rate"]:
            ms = besides_ms + 1e3 * exposed_s(queue, row["rate"])
            row["predicted_exposed_ms"] = round(ms, 2)


def measure_table(
    network: Network,
    folder: Path,
    connector: str,
    requests: int,
    lengths: Sequence[int],
    rates: Sequence[float],
    pushes: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Measure each push mode, rate and prompt length with one connector."""
    rows: dict[str, dict[str, Any]] = {}
    for push in pushes:
        with running(network, folder, connector, push) as programs:
            for rate in rates:
                # The sender measures the new bandwidth.
                measure(network, programs.router, rate, min(WARM_TOKENS, max(lengths)), NUM_WARM)
                for length in lengths:
                    least = LEAST_REQUESTS if push == "layers" else 1
                    number = max(least, round(requests * min(1.0, 2048 / length)))
                    found = measure(network, programs.router, rate, length, number)
                    name = f"{connector}, {push}, {speed_of(rate)}, {length} tokens"
                    rows[name] = figures(found, rate, push)
    predict(rows)
    for name, row in rows.items():
        print_row(name, row)
    return rows


def measure_variants(
    network: Network, folder: Path, length: int, requests: int
) -> dict[str, dict[str, Any]]:
    """Measure fp8 KV and digests over the slow link, sent after the prefill and by layers."""
    rows = {}
    for name, options in VARIANTS.items():
        for push in PUSHES:
            with running(network, folder, "nixl", push, options) as programs:
                measure(network, programs.router, UNLIMITED, length, 1)  # warm-up
                found = measure(network, programs.router, SLOW_RATE, length, requests)
                rows[f"{name}, {push}"] = figures(found, SLOW_RATE, push)
                print_row(f"{name}, {push}, {length} tokens", rows[f"{name}, {push}"])
    return rows


def run(
    run: Run,
    requests: int = 5,
    lengths: Sequence[int] = LENGTHS,
    rates: Sequence[float] = (*RATES, SLOW_RATE),
    connectors: Sequence[str] = CONNECTORS,
    pushes: Sequence[str] = PUSHES,
    seconds: float = 5.0,
    parts: Sequence[Part] = PARTS,
    congestion_control: str = "",
) -> Document | None:
    """Measure each connector, push mode, rate and prompt length.

    Args:
        requests: number of requests for each length up to 2,048 tokens; longer prompts get fewer,
            but at least three if KV is sent by layers.
        rates: Gbit/s of the nodes' links; 0: unlimited.
        connectors: nixl, tls.
        pushes: layers, after-prefill.
        seconds: time for which each link is filled.
        parts: links: full links; table: requests; variants: fp8 and digests on a slow link.
        congestion_control: algorithm of the hosts' TCP connections, such as cubic or reno; empty:
            this machine's.
    """
    if reason := why_no_hosts():
        run.problems.append(reason)
        return None
    document: dict[str, Any] = dict(run.saved()) if set(parts) != set(PARTS) else {}
    with Network(HOSTS, ["ipv4"]) as network, tempfile.TemporaryDirectory() as path:
        folder = make_checkpoint(Path(path))
        # Before gRPC starts threads, because threads stay in the network where they start
        network.enter("client")
        if congestion_control:
            network.set_congestion_control(congestion_control)
        for connector in connectors:
            if "links" in parts:
                document["congestion_control"] = congestion_control or own_congestion_control()
                fast = [rate for rate in rates if rate != SLOW_RATE]
                links = document.setdefault("links", {})
                links |= measure_full_links(network, connector, fast, seconds)
                links |= measure_slow_neighbour(network, connector, 1.0, seconds)
            if "table" in parts:
                document.setdefault("rows", {}).update(
                    measure_table(network, folder, connector, requests, lengths, rates, pushes)
                )
        if "variants" in parts:
            document["slow"] = measure_variants(network, folder, 1024, 2)
    return document


def own_congestion_control() -> str:
    """Return the congestion control of this machine's new TCP connections."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def speed_of(rate: float) -> str:
    """Return a rate in Gbit/s as text; 0: unlimited."""
    return f"{rate:g} Gbit/s" if rate else "unlimited"


def print_row(name: str, row: dict[str, Any]) -> None:
    """Print the main figures of one row."""
    parts = [f"exposed {row['exposed_transfer_ms']:.2f} ms"]
    parts += [f"router expected {row['expected_exposed_ms']:.2f} ms"]
    parts += [f"prefill {row['prefill_ms']:.0f} ms"]
    if "predicted_exposed_ms" in row:
        parts.append(f"predicted {row['predicted_exposed_ms']:.2f} ms")
    if "least_gbit_per_s" in row:
        parts.append(f"flat from {row['least_gbit_per_s']:.2f} Gbit/s")
    if "gbit_per_s" in row:
        parts.append(f"sent at {row['gbit_per_s']:.2f} Gbit/s")
    if "share_of_link" in row:
        parts.append(f"share of the link {row['share_of_link']:.2f}")
    print(f"{name:44} | {' | '.join(parts)} | {row['transport']}", flush=True)
