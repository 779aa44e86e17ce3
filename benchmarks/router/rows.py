"""Rows of the page about one router: CPU, memory, index of prefixes, HTTP."""

from __future__ import annotations

import statistics

from benchmarks.page.rows import (
    Found,
    Json,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    number,
    ratio,
    value,
)

TIMES_RELAY = 3.0
FLAT = 1.05  # memory at the end / at the beginning
MOST_MATCH_US = 300.0


def _rates(document: Json, subject: str, offered: int | str, name: str) -> float:
    """Average all rounds."""
    rows = [
        row
        for row in at(document, "rates")
        if (at(row, "subject"), at(row, "offered")) == (subject, offered)
    ]
    return statistics.fmean(number(row, name) for row in rows)


def _against_relay(offered: int | str) -> Row:
    is_limit = offered == "all"
    load = "all that nodes can" if is_limit else f"{offered:,} tokens/s"

    def measure(document: Json) -> Found:
        ours, relays = (
            _rates(document, subject, offered, "tokens_per_core_s")
            for subject in ("router", "relay")
        )
        found = ours / relays
        holds = found >= TIMES_RELAY if is_limit else None
        return Found(f"{found:.1f} ({ours:,.0f} / {relays:,.0f})", holds)

    return Row(
        f"tokens per core-second, router / bare gRPC relay, offered {load}",
        measure,
        f">= {TIMES_RELAY:g}" if is_limit else "",
        "a message to a client costs gRPC the same with one token as with a hundred.",
    )


def _two_routers(document: Json) -> Found:
    two = _rates(document, "2 routers, one port", "all", "tokens_per_core_s")
    one = _rates(document, "router", "all", "tokens_per_core_s")
    return Found(f"{two / one:.2f} ({two:,.0f} / {one:,.0f})", two > one)


def _cpu_per_token(document: Json) -> Found:
    offered = (2_000, 20_000, 60_000, "all")
    costs = [_rates(document, "router", rate, "cpu_us_per_token") for rate in offered]
    return Found(" / ".join(f"{cost:.1f}" for cost in costs) + " us")


def _cpu_per_request(document: Json) -> Found:
    rows = at(document, "requests")
    costs = (
        f"{number(row, 'cpu_us_per_request') / 1e3:.2f} ms ({number(row, 'tokens_per_request'):g})"
        for row in rows
    )
    return Found(", ".join(costs))


def _held(document: Json) -> Found:
    most = max(at(document, "held"), key=lambda row: number(row, "num_streams"))
    streams, kib = number(most, "num_streams"), number(most, "kib_per_stream")
    return Found(f"{streams:,.0f}, {kib:.0f} KiB each")


def _memory(document: Json) -> Found:
    hour = at(document, "an_hour_at_10_per_s")
    mib = at(hour, "memory_mib_per_tenth")
    growth = number(mib, -1) / number(mib, 0)
    requests = number(hour, "num_requests")
    text = f"{growth:.3f} ({mib[0]} -> {mib[-1]} MiB, {requests:,.0f} requests)"
    return Found(text, growth <= FLAT)


ROUTER = Source(
    "router_cost",
    (
        *(_against_relay(offered) for offered in (2_000, 20_000, 60_000, "all")),
        Row("CPU per token at 2,000 / 20,000 / 60,000 / all", _cpu_per_token),
        Row("CPU per request (of so many tokens)", _cpu_per_request),
        Row("streams held open that say nothing", _held),
        Row("memory after many requests / before", _memory, f"flat: <= {FLAT}"),
        Row(
            "tokens per core-second, two routers on one port and one core / one router",
            _two_routers,
            "> 1",
            "two that share one core each see it half idle and merge fewer tokens per"
            " message; with a core each it is not measured.",
        ),
    ),
    "One router on a core of its own, 256 streams, against a relay that does nothing else.",
)


PREFIX_INDEX = Source(
    "prefix_index",
    (
        Row(
            "who has a prompt of 16,000 tokens, among 512 nodes with 2 million blocks",
            value(
                "results",
                "match 16,000 tokens: 10 nodes have much, all a little, us",
                "median",
                form="{:.0f} us",
                most=MOST_MATCH_US,
            ),
            f"<= {MOST_MATCH_US:g} us",
            "most of the time is in cache misses (log).",
        ),
        Row(
            "events taken, stored and removed in turns",
            value(
                *("results", "stored and removed in turns, thousands/s", "median"),
                form="{:,.0f} thousand/s",
            ),
        ),
        Row(
            "memory per block of a node",
            value(*("results", "memory per block of a node, bytes", "median"), form="{:.0f} bytes"),
        ),
        Row(
            "a node's step that names 16 blocks: with a router that listens / without",
            ratio(
                ("results", "a node's step that names 16 blocks, sent every 10 ms, us", "median"),
                ("results", "a node's step that names 16 blocks, nobody listens, us", "median"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
            ),
        ),
    ),
)


def _http(server: str, num_streams: int) -> Row:
    def measure(document: Json) -> Found:
        cost = {
            at(row, "server"): number(row, "cpu_us_per_token", "median")
            for row in at(document, "results")
            if at(row, "num_streams") == num_streams
        }
        ours, theirs = cost["aiohttp"], cost[server]
        return Found(f"{ours / theirs:.2f} ({ours:.1f} / {theirs:.1f} us)")

    return Row(f"CPU per token, {num_streams} streams: aiohttp / {server}", measure)


HTTP = Source(
    "http_servers",
    tuple(
        _http(f"uvicorn (httptools), {framework}", num_streams)
        for framework in ("no framework", "Starlette")
        for num_streams in (64, 256)
    ),
)


TLS = Source(
    "tls_cost",
    (
        Row(
            "tokens per core-second with mTLS / plain, all that nodes can",
            value("mtls_over_plain", "all offered", "tokens_per_core_s", "median", least=0.95),
            ">= 0.95",
        ),
    ),
    options="--parts tls",
)
TRACING = Source(
    "trace_cost",
    (
        Row(
            "CPU of tracing, all requests traced: share of a request's",
            value("itself", "all sampled", "share", form="{:.1%}", most=0.03),
            "<= 3 %",
        ),
        Row(
            "CPU of tracing that is off: share of a request's",
            value("itself", "off", "share", form="{:.2%}", most=0.005),
            "<= 0.5 %",
        ),
    ),
    options="--parts tracing",
)
SUBJECT = Subject(
    "The router",
    (
        Measurement(
            "benchmarks.router.router_cost",
            "router/calls router/intake baton/serving baton/link baton/access baton/telemetry",
            (ROUTER, TLS, TRACING),
        ),
        Measurement("benchmarks.router.prefix_index", "router/fleet", (PREFIX_INDEX,)),
        Measurement("benchmarks.router.http_servers", "baton/serving", (HTTP,)),
        Measurement("benchmarks.router.loop_holds", "router/intake engine/sampling"),
        Measurement("benchmarks.router.large_vocabulary", "router/intake engine/sampling"),
    ),
    log=(
        "2026-11-21: what a router costs",
        "2026-11-21: an index of all nodes' prefix caches at the router",
        "2026-11-21: a streamed token over HTTP, on aiohttp and on uvicorn",
    ),
)
