"""What mTLS costs a router: throughput with it beside without it, in turns, on one machine.

The site of `router_cost.py`: the real `baton router`, alone on one core, between nodes that only
talk and a client; once plain and once with certificates that everybody must show:

    python benchmarks/tls_cost.py [--seconds 6] [--rounds 4]

Offered is all that the nodes can, and fixed rates: TLS costs per record, so most per token where
each token is a message of its own. Prediction, before the first run: AES-GCM takes about a
nanosecond for each byte and a microsecond for each record, of some 40 us that a message costs. So
2 to 4 % at full load, where a message holds many tokens, and 3 to 6 % at 20,000 tokens/s. Goal:
0.95 of plain at full load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from baton.access.dev_certificates import LOCAL_HOSTS, Holder, write_dev_certificates
from baton.access.tls import NO_TLS, TlsOptions
from environment import record_environment, write_results
from router_cost import large_model, measure_rate, measure_requests, router_site

RATES = (0, 20_000)  # tokens/s of all streams; 0: all that the nodes can
GOAL = 0.95
NODES = ("node/prefill/prefill", "node/decode/decode")  # as the nodes of the site are named


def certificate(folder: Path) -> TlsOptions:
    """One for everybody: what it costs is not in what it says."""
    paths = (*NODES, "infer-look-operate/all")
    holder = Holder(name="all", uri_paths=paths, hosts=LOCAL_HOSTS)
    write_dev_certificates(folder, [holder], days=1)
    own = str(folder / "all")
    return TlsOptions(cert=f"{own}.crt", key=f"{own}.key", ca=str(folder / "ca.crt"))


def ratios(rows: list[dict[str, Any]], measure: str) -> dict[str, float]:
    """Mutual TLS over plain, of neighbours in time; and how far the rounds are apart."""
    plain = [row[measure] for row in rows if row["subject"] == "plain"]
    mtls = [row[measure] for row in rows if row["subject"] == "mtls"]
    found = [ours / theirs for ours, theirs in zip(mtls, plain, strict=True)]
    return {
        "median": round(statistics.median(found), 3),
        "lowest": round(min(found), 3),
        "highest": round(max(found), 3),
    }


async def run(options: argparse.Namespace, model: Path, tls: TlsOptions) -> dict[str, object]:
    """Each rate in turns: plain first in even rounds, mutual TLS first in odd ones."""
    rates: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    subjects = [("plain", NO_TLS), ("mtls", tls)]
    for round_number in range(options.rounds):
        for name, own in subjects if round_number % 2 == 0 else reversed(subjects):
            for rate in RATES:
                with router_site(model, options.streams / rate if rate else 0.0, tls=own) as site:
                    measured = await measure_rate(
                        site, is_relay=False, num_streams=options.streams, seconds=options.seconds
                    )
                rates.append({"subject": name, "offered": rate or "all", **measured})
                print(rates[-1], flush=True)
            with router_site(model, 0.005, tls=own) as site:
                found = await measure_requests(site, num_requests=1_000, max_tokens=16)
            requests.append({"subject": name, **found})
            print(requests[-1], flush=True)
    return {
        "goal": {"tokens_per_s, all offered, of plain": GOAL},
        "mtls_over_plain": {
            **{
                f"{measure}, {rate or 'all'} offered": ratios(
                    [row for row in rates if row["offered"] == (rate or "all")], measure
                )
                for rate in RATES
                for measure in ("tokens_per_s", "tokens_per_core_s")
            },
            "requests_per_s": ratios(requests, "requests_per_s"),
            "cpu_us_per_request": ratios(requests, "cpu_us_per_request"),
        },
        "rates": rates,
        "requests": requests,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=256)
    options = parser.parse_args()
    environment = record_environment()
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        tls = certificate(Path(folder) / "certificates")
        results = uvloop.run(run(options, large_model(Path(folder)), tls))
    print(results["mtls_over_plain"])
    write_results("tls_cost", environment, results)


if __name__ == "__main__":
    main()
