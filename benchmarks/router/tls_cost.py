"""Measure what mTLS costs a router: throughput beside a plain router, in turns.

The site of `router_cost.py`: the real `baton router`, alone on one core, between nodes that only
talk and a client; once plain and once with certificates that everybody must show:
Both routers are up all the while, and slices of each are measured in turns: what the machine does
beside them changes more slowly. Where all is offered, how many tokens share a message is chance, so
what a message costs tells more there than the tokens do.

Offered is all that the nodes can, and fixed rates: TLS costs per record, so most per token where
each token is a message of its own. Prediction, before the first run: AES-GCM takes about a
nanosecond for each byte and a microsecond for each record, of some 40 us that a message costs. So
2 to 4 % at full load, where a message holds many tokens, and 3 to 6 % at 20,000 tokens/s. Goal:
0.95 of plain at full load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.access.dev_certificates import LOCAL_HOSTS, Holder, write_dev_certificates
from baton.access.tls import TlsOptions
from benchmarks.router.router_cost import (
    Options,
    Site,
    in_turns,
    measure_rate,
    measure_requests,
    ratios,
    router_site,
)

RATES = (0, 20_000)  # tokens/s of all streams; 0: all that the nodes can
GOAL = 0.95
SLICE_S = 1.5
RATE_FIGURES = ("tokens_per_s", "tokens_per_core_s", "cpu_us_per_message")
REQUEST_FIGURES = ("requests_per_s", "cpu_us_per_request")
NODES = ("node/prefill/prefill", "node/decode/decode")  # as the nodes of the site are named


def certificate(folder: Path) -> TlsOptions:
    """Write one certificate for everybody; its names cost nothing."""
    paths = (*NODES, "infer-look-operate/all")
    holder = Holder(name="all", uri_paths=paths, hosts=LOCAL_HOSTS)
    write_dev_certificates(folder, [holder], days=1)
    own = str(folder / "all")
    return TlsOptions(cert=f"{own}.crt", key=f"{own}.key", ca=str(folder / "ca.crt"))


async def measure_tls(options: Options, model: Path) -> dict[str, Any]:
    """Measure a plain router and one with mTLS, slices in turns."""
    tls, slices = certificate(model / "certificates"), options.slices or 12

    async def rate_of(site: Site) -> Mapping[str, Any]:
        return await measure_rate(
            site, is_relay=False, num_streams=options.streams, seconds=SLICE_S
        )

    async def requests_of(site: Site) -> Mapping[str, Any]:
        found = await measure_requests(site, num_requests=500, max_tokens=16)
        return {name: found[name] for name in ("requests_per_s", "cpu_us_per_request")}

    found: dict[str, object] = {}
    rows: dict[str, object] = {}
    workloads: list[tuple[str, float, Any, Sequence[str]]] = [
        (f"{rate or 'all'} offered", options.streams / rate if rate else 0.0, rate_of, RATE_FIGURES)
        for rate in RATES
    ]
    workloads.append(("short requests", 0.005, requests_of, REQUEST_FIGURES))
    for name, interval_s, measure, figures in workloads:
        with (
            router_site(model, interval_s) as plain,
            router_site(model, interval_s, tls=tls) as mtls,
        ):
            these = await in_turns({"plain": plain, "mtls": mtls}, slices, measure)
        rows[name] = these
        found[name] = {figure: ratios(these, figure, "mtls", "plain") for figure in figures}
        print(name, found[name], flush=True)
    return {"goal": {"throughput over plain": GOAL}, "mtls_over_plain": found, "slices": rows}
