"""What tracing costs a router: all requests traced beside none, in turns, on one machine.

The site of `router_cost.py`: the real `baton router`, alone on one core, between nodes that only
talk and a client; a collector takes the spans on the other core:

    python benchmarks/trace_cost.py [--num-requests 2000] [--rounds 4]

Requests of 64 tokens, 64 at a time: at the pace of an engine's steps (5 ms), where CPU per request
is compared; and as fast as the router can, where requests per second are. What tracing costs when
it is off is measured apart, as it is far below what differs between two rounds: the calls that are
made for it, over what a request costs.

Prediction, before the first run: five spans of some 9 us each, of a request that costs 2 ms: 2 %;
as fast as it can, where tokens come many to a message, a request costs half, and 4 % are lost.
Goals: <= 3 % of throughput and of CPU with all sampled, <= 0.5 % off.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import uvloop

from baton.serving.access_log import AccessEntry
from baton.telemetry.tracing import NO_TRACING
from environment import record_environment, write_results
from router_cost import large_model, measure_requests, router_site

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PACES_S = (0.005, 0.0)
MAX_TOKENS = 64
GOALS = {"all sampled": 1.03, "off": 1.005}
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def cost_when_off_us() -> float:
    """Of what a request calls for tracing when nothing is traced; of a request with a header."""
    number = 200_000
    entry = AccessEntry()
    began = time.perf_counter()
    for _ in range(number):
        entry.join_trace(NO_TRACING, HEADER, "")
        time.perf_counter()  # `Following.note_admitted`
    return (time.perf_counter() - began) / number * 1e6


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """Give the endpoint of a collector that takes all and reads nothing."""
    command = [sys.executable, __file__, "--collect"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def collect() -> None:
    """Be that collector."""
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service, method = EXPORT.strip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def run(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for pace_s in PACES_S:
            for name in ("off", "on") if number % 2 == 0 else ("on", "off"):
                with collecting() as endpoint:
                    more = ["--trace-endpoint", endpoint] if name == "on" else []
                    with router_site(model, pace_s, router_args=more) as site:
                        await measure_requests(site, num_requests=200, max_tokens=MAX_TOKENS)
                        found = await measure_requests(
                            site, num_requests=options.num_requests, max_tokens=MAX_TOKENS
                        )
                del found["memory_mib_per_tenth"]
                rows.append({"subject": name, "step_s": pace_s, **found})
                print(rows[-1], flush=True)
    off_us = cost_when_off_us()
    request_us = statistics.median(
        row["cpu_us_per_request"] for row in rows if row["subject"] == "off"
    )
    return {
        "goals": GOALS,
        "cpu, on over off": {pace: ratios(rows, pace, "cpu_us_per_request") for pace in PACES_S},
        "requests_per_s, on over off": {
            pace: ratios(rows, pace, "requests_per_s") for pace in PACES_S
        },
        "off": {"us_per_request": round(off_us, 2), "share": round(off_us / request_us, 5)},
        "rounds": rows,
    }


def ratios(rows: list[dict[str, Any]], pace_s: float, measure: str) -> dict[str, float]:
    """Traced over not traced, of neighbours in time; and how far the rounds are apart."""
    by_name = {
        name: [row[measure] for row in rows if (row["subject"], row["step_s"]) == (name, pace_s)]
        for name in ("on", "off")
    }
    found = [on / off for on, off in zip(by_name["on"], by_name["off"], strict=True)]
    return {
        "median": round(statistics.median(found), 3),
        "lowest": round(min(found), 3),
        "highest": round(max(found), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--collect", action="store_true", help="be the collector")
    options = parser.parse_args()
    if options.collect:
        collect()
        return
    environment = record_environment()
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(run(options, large_model(Path(folder))))
    print({key: value for key, value in results.items() if key != "rounds"})
    write_results("trace_cost", environment, results)


if __name__ == "__main__":
    main()
