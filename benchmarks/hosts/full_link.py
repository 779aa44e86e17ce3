"""Measures full links between hosts: the share of a link's rate that KV gets, and messages' waits.

A sender and receivers without engines (`kv_end.py`) run on hosts of their own. The sender always
has transfers open, so that the link is always full, and exchanges a beat with each receiver every
10 ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.hosts.network import Network

SENDER, RECEIVER, SLOW = "p0", "d0", "d1"
NUM_BLOCKS, FEW_BLOCKS = 512, 64  # per transfer: 64 MiB, and 8 MiB where a link is very slow
SLOWNESS = 20.0  # the fast link's rate divided by the slow link's
WARM_S, BITS = 2.0, 8


class Cpu(NamedTuple):
    """CPU time of a process: seconds of running, and of waiting for a CPU while it could run."""

    run_s: float
    wait_s: float


class End:
    """One end of the connector in a child process on a host, which carries out orders."""

    def __init__(self, network: Network, host: str, connector: str) -> None:
        role = "send" if host == SENDER else "receive"
        words = (role, f"{host}-{connector}", connector, network.at(host, 0))
        command = [sys.executable, "-m", "benchmarks.hosts.kv_end", *words]
        self._process = subprocess.Popen(
            network.command(host, *command, 2 * NUM_BLOCKS),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "UCX_NET_DEVICES": "eth0"},
        )  # fmt: skip
        self.info = self._answer()["info"]

    def send_order(self, **order: Any) -> None:
        """Send an order to the child, and do not wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def carry_out(self, **order: Any) -> dict[str, Any]:
        """Let the child carry out an order; return its answer."""
        self.send_order(**order)
        return self._answer()

    def cpu(self) -> Cpu:
        """Return the CPU time of all of the child's threads so far."""
        own = self._process.pid
        [child] = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        stats = [one.read_text().split() for one in Path(f"/proc/{child}/task").glob("*/schedstat")]
        return Cpu(*(sum(int(words[place]) for words in stats) / 1e9 for place in (0, 1)))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("an end of the connector has failed")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def connected(
    network: Network, connector: str, receivers: Sequence[str], ends: list[End] | None = None
) -> Iterator[tuple[End, dict[str, str]]]:
    """Connect a sender to receivers; yield the sender and the receivers' engine ids by host.

    Args:
        ends: a list to which the sender and then the receivers are added.
    """
    with ExitStack() as stack:

        def start(host: str) -> End:
            end = End(network, host, connector)
            stack.callback(end.close)
            if ends is not None:
                ends.append(end)
            return end

        sender, ids = start(SENDER), {}
        for host in receivers:
            receiver = start(host)
            receiver.send_order(peer=sender.info)
            ids[host] = sender.carry_out(peer=receiver.info)["engine_id"]
        yield sender, ids


def load(
    sender: End, ids: Sequence[str], seconds: float, num_blocks: int = NUM_BLOCKS
) -> dict[str, Any]:
    """Fill the links to some receivers; return the ends' figures by engine id."""
    return sender.carry_out(num_blocks=num_blocks, seconds=seconds, engine_ids=list(ids))


def warm_up(sender: End, ids: Sequence[str], num_blocks: int = NUM_BLOCKS) -> None:
    """Let the sender measure the bandwidth of links whose rates were just changed."""
    load(sender, ids, WARM_S, num_blocks)


def cpu_figures(
    before: Sequence[Cpu], ends: Sequence[End], found: Mapping[str, Any]
) -> dict[str, float]:
    """Return each end's CPU time and waits during a load, and the rate that would use all CPUs.

    Messages are late if an end waits for a CPU for a large share of the time. The CPU time contains
    most of the kernel's work for packets, also for the virtual links between the hosts.
    """
    spent = [
        Cpu(after.run_s - first.run_s, after.wait_s - first.wait_s)
        for first, after in zip(before, (end.cpu() for end in ends), strict=True)
    ]
    gigabytes, num_cpus = found["num_bytes"] / 1e9, len(os.sched_getaffinity(0))
    row = {"most_in_flight_mb": round(found["most_in_flight"] / 1e6, 2)}
    for name, cpu in zip(("sender", "receiver"), spent, strict=True):
        row[f"{name}_cpu_s_per_gb"] = round(cpu.run_s / gigabytes, 3)
        row[f"{name}_waits_for_cpu"] = round(cpu.wait_s / found["seconds"], 3)
    cost_s = sum(cpu.run_s for cpu in spent) / gigabytes
    row["most_gbit_per_s_of_cpus"] = round(BITS * num_cpus / cost_s, 2)
    return row


def figures(found: Mapping[str, Any], rate: float) -> dict[str, float]:
    """Return a load's Gbit/s, share of the link, and round trips of messages in milliseconds."""
    gbit_per_s = found["num_bytes"] * BITS / found["seconds"] / 1e9
    trips_ms = sorted(1e3 * trip for trip in found["round_trips_s"])
    row = {
        "gbit_per_s": round(gbit_per_s, 3),
        "message_p50_ms": round(statistics.median(trips_ms), 2),
        "message_p99_ms": round(trips_ms[int(0.99 * len(trips_ms))], 2),
        "message_max_ms": round(trips_ms[-1], 2),
        "num_messages": len(trips_ms),
        "known_gbit_per_s": round(found["known_rate"] * BITS / 1e9, 3),
    }
    return row | ({"share_of_link": round(gbit_per_s / rate, 3)} if rate else {})


def measure_full_links(
    network: Network, connector: str, rates: Sequence[float], seconds: float
) -> dict[str, dict[str, float]]:
    """Fill one link at each rate, in Gbit/s; 0: unlimited."""
    rows = {}
    ends: list[End] = []
    with connected(network, connector, [RECEIVER], ends) as (sender, ids):
        for rate in rates:
            for host in (SENDER, RECEIVER):
                network.limit(host, rate * 1e9 or None)
            warm_up(sender, list(ids.values()))
            before = [end.cpu() for end in ends]
            found = load(sender, list(ids.values()), seconds)[ids[RECEIVER]]
            name = f"{connector}, {f'{rate:g} Gbit/s' if rate else 'unlimited'}"
            rows[name] = figures(found, rate) | cpu_figures(before, ends, found)
            print(f"{name:28} {rows[name]}", flush=True)
    for host in (SENDER, RECEIVER):
        network.limit(host, None)
    return rows


def measure_slow_neighbour(
    network: Network, connector: str, rate: float, seconds: float
) -> dict[str, dict[str, float]]:
    """Fill the links to two receivers; a slow link must not delay the other link."""
    rates = {RECEIVER: rate, SLOW: rate / SLOWNESS}
    with connected(network, connector, list(rates)) as (sender, ids):
        for host, own in rates.items():
            network.limit(host, own * 1e9)
        warm_up(sender, list(ids.values()), FEW_BLOCKS)
        found = load(sender, list(ids.values()), seconds, FEW_BLOCKS)
    rows = {}
    for host, own in rates.items():
        network.limit(host, None)
        name = f"{connector}, {own:g} Gbit/s, beside another receiver"
        rows[name] = figures(found[ids[host]], own)
        print(f"{name:28} {rows[name]}", flush=True)
    return rows
