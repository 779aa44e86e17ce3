"""Measure the cost of a router process: CPU per token and request, open streams, memory.

The real `baton router` runs alone on one core, between nodes without an engine and a client:

    costs     compared with a bare grpc.aio relay that has one stream per request
    tls       with mutual TLS, compared with a plain router
    tracing   with all requests traced, compared with none (`trace_cost.py`)
    sharing   beside other programs on its core, and two routers (`router_sharing.py`)

    python -m benchmarks router_cost [--parts costs tls tracing sharing] [--seconds 4] [--rounds 2]

Nodes send tokens like an engine: each step has one token per stream. A token costs less when the
router is the bottleneck, because waiting tokens then share one message; so each rate is reported
separately. The number of tokens per message then varies by chance, so TLS is also judged by its
cost per message, because the cost of TLS is per TLS record.

Two routers that are compared both run all the time, and short slices of each are measured in turns,
so that other load on the machine, which changes more slowly, affects both equally.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import uvloop

from baton.access.dev_certificates import LOCAL_HOSTS, Holder, write_dev_certificates
from baton.access.tls import TlsOptions
from benchmarks.router.router_sharing import measure_sharing
from benchmarks.router.router_site import (
    Site,
    in_turns,
    large_model,
    measure_held,
    measure_rate,
    measure_requests,
    ratios,
    relay_site,
    router_site,
)
from benchmarks.router.trace_cost import measure_tracing
from benchmarks.runner.run import Run

# Tokens per second of all streams; 0: as many as the nodes can send
RATES = (2_000, 20_000, 60_000, 0)
TLS_RATES, TLS_SLICE_S = (0, 20_000), 1.5
RATE_FIGURES = ("tokens_per_s", "tokens_per_core_s", "cpu_us_per_message")
REQUEST_FIGURES = ("requests_per_s", "cpu_us_per_request")
NODES = ("node/prefill/prefill", "node/decode/decode")  # the names that router_site.py uses


def certificate(folder: Path) -> TlsOptions:
    """Write one certificate for all programs, which contains all their names."""
    paths = (*NODES, "infer-look-operate/all")
    holder = Holder(name="all", uri_paths=paths, hosts=LOCAL_HOSTS)
    write_dev_certificates(folder, [holder], days=1)
    own = str(folder / "all")
    return TlsOptions(cert=f"{own}.crt", key=f"{own}.key", ca=str(folder / "ca.crt"))


async def measure_tls(options: Options, model: Path) -> dict[str, Any]:
    """Measure a router without TLS and a router with mTLS, in slices that alternate."""
    tls, slices = certificate(model / "certificates"), options.slices or 12

    async def rate_of(site: Site) -> Mapping[str, Any]:
        return await measure_rate(
            site, is_relay=False, num_streams=options.streams, seconds=TLS_SLICE_S
        )

    async def requests_of(site: Site) -> Mapping[str, Any]:
        found = await measure_requests(site, num_requests=500, max_tokens=16)
        return {name: found[name] for name in REQUEST_FIGURES}

    workloads: list[tuple[str, float, Any, Sequence[str]]] = [
        (f"{rate or 'all'} offered", options.streams / rate if rate else 0.0, rate_of, RATE_FIGURES)
        for rate in TLS_RATES
    ]
    workloads.append(("short requests", 0.005, requests_of, REQUEST_FIGURES))
    found: dict[str, object] = {}
    rows: dict[str, object] = {}
    for name, interval_s, measure, figures in workloads:
        with (
            router_site(model, interval_s) as plain,
            router_site(model, interval_s, tls=tls) as mtls,
        ):
            these = await in_turns({"plain": plain, "mtls": mtls}, slices, measure)
        rows[name] = these
        found[name] = {figure: ratios(these, figure, "mtls", "plain") for figure in figures}
        print(name, found[name], flush=True)
    return {"mtls_over_plain": found, "slices": rows}


async def measure_costs(options: Options, model: Path) -> dict[str, Any]:
    """Compare the router with a relay; measure requests, memory growth, and open streams."""
    rates: list[Mapping[str, object]] = []
    for round_number in range(options.rounds):
        for rate in options.rates:
            interval_s = options.streams / rate if rate else 0.0
            subjects = (
                ("relay", relay_site(interval_s)),
                ("router", router_site(model, interval_s)),
                ("2 routers, one port", router_site(model, interval_s, 2)),
            )
            for name, context in subjects:
                if (name.startswith("2") and rate != 0) or (name == "relay" and options.skip_relay):
                    continue
                with context as site:
                    measured = await measure_rate(
                        site,
                        is_relay=name == "relay",
                        num_streams=options.streams,
                        seconds=options.seconds,
                    )
                row = {"subject": name, "offered": rate or "all", "round": round_number, **measured}
                print(row, flush=True)
                rates.append(row)
    with router_site(model, 0.005) as site:
        requests = [
            await measure_requests(site, num_requests=2_000, max_tokens=tokens)
            for tokens in (1, 2, 16)
        ]
        print(requests, flush=True)
        hour = await measure_requests(site, num_requests=options.num_requests, max_tokens=16)
        print(hour, flush=True)
    held: list[dict[str, float]] = []
    for num_streams in options.held:
        with router_site(model, 30.0) as site:
            held.append(await measure_held(site, num_streams))
            print(held[-1], flush=True)
    return {"rates": rates, "requests": requests, "an_hour_at_10_per_s": hour, "held": held}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parts, loads and times of the measurement.

    Attributes:
        parts: costs: compared with a relay; tls: mTLS compared with plain; tracing: all requests
            traced compared with none; sharing: other programs on the router's core.
        slices: number of slices of each router; 0: 12 for tls, 30 for tracing.
        requests: number of requests of a slice.
        held: numbers of streams that are held open.
    """

    parts: Sequence[Literal["costs", "tls", "tracing", "sharing"]] = ("costs",)
    seconds: float = 4.0
    rounds: int = 2
    streams: int = 256
    num_requests: int = 36_000
    rates: Sequence[int] = RATES
    skip_relay: bool = False
    held: Sequence[int] = (256, 2_000, 8_000)
    slices: int = 0
    requests: int = 300


def run(run: Run, options: Options) -> None:
    """Measure the chosen parts; each has its own file of results."""
    os.sched_setaffinity(0, {1})

    async def tracing(options: Options, model: Path) -> dict[str, Any]:
        return await measure_tracing(options.slices or 30, options.requests, model)

    async def sharing(options: Options, model: Path) -> dict[str, Any]:
        return await measure_sharing(
            model, num_streams=options.streams, seconds=options.seconds, rounds=options.rounds
        )

    measures = {
        "costs": measure_costs, "tls": measure_tls, "tracing": tracing, "sharing": sharing,
    }  # fmt: skip
    names = {
        "costs": "router_cost", "tls": "tls_cost", "tracing": "trace_cost",
        "sharing": "router_sharing",
    }  # fmt: skip
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            document = uvloop.run(measures[part](options, large_model(Path(folder))))
        name = names[part]
        run.judge({key: value for key, value in document.items() if key != "slices"}, name)
        run.save(document, name)
