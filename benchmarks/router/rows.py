"""Rows of docs/performance.md about a router: CPU, memory, prefix index, HTTP."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.page.measures import at, number, ratio, told, value
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject


def _rates(document: Json, subject: str, offered: int | str, name: str) -> float:
    """Return the mean of a figure over all rounds of a subject."""
    rows = [
        row
        for row in at(document, "rates")
        if (at(row, "subject"), at(row, "offered")) == (subject, offered)
    ]
    return statistics.fmean(number(row, name) for row in rows)


def _against_relay(offered: int | str, target: str = "") -> Row:
    load = f"{offered:,} tokens/s" if isinstance(offered, int) else "all that nodes can"

    def measure(document: Json) -> Found:
        ours, relays = (
            _rates(document, subject, offered, "tokens_per_core_s")
            for subject in ("router", "relay")
        )
        return Found(f"{ours / relays:.1f} ({ours:,.0f} / {relays:,.0f})", ours / relays)

    return Row(
        f"tokens per core-second, router / bare gRPC relay, offered {load}",
        measure,
        target,
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
    costs = (
        f"{number(row, 'cpu_us_per_request') / 1e3:.2f} ms ({number(row, 'tokens_per_request'):g})"
        for row in at(document, "requests")
    )
    return Found(", ".join(costs))


def _held(document: Json) -> Found:
    most = max(at(document, "held"), key=lambda row: number(row, "num_streams"))
    streams, kib = number(most, "num_streams"), number(most, "kib_per_stream")
    return Found(f"{streams:,.0f}, {kib:.0f} KiB each")


def _memory(document: Json) -> Found:
    hour = at(document, "an_hour_at_10_per_s")
    mib, requests = at(hour, "memory_mib_per_tenth"), number(hour, "num_requests")
    growth = number(mib, "-1") / number(mib, "0")
    return Found(f"{growth:.3f} ({mib[0]} -> {mib[-1]} MiB, {requests:,.0f} requests)", growth)


ROUTER = Source("router_cost", (
    *(_against_relay(offered) for offered in (2_000, 20_000, 60_000)),
    _against_relay("all", ">= 3"),
    Row("CPU per token at 2,000 / 20,000 / 60,000 / all", _cpu_per_token),
    Row("CPU per request (in parentheses its tokens)", _cpu_per_request),
    Row("idle streams held open", _held),
    Row("memory after many requests / before", _memory, "flat: <= 1.05"),
    Row("tokens per core-second, two routers on one port and one core / one router", _two_routers,
        "> 1",
        "a router that shares its core merges fewer tokens into a message. Beside other programs on"
        " the core, one router makes as few tokens per core-second as two do (log). Give each"
        " router a core."),
), "One router on a core of its own, 256 streams, compared with a relay that does nothing"
   " else.")  # fmt: skip
_STEP = "results > a node's step that names 16 blocks, {}, us > median"
PREFIX_INDEX = Source("prefix_index", (
    Row("find the nodes that have a prompt of 16,000 tokens, of 512 nodes with 2 million blocks",
        value("results > match 16,000 tokens: 10 nodes have much, all a little, us > median",
              "{:.0f} us"), "<= 300 us", "most of the time is in cache misses (log)."),
    Row("events applied, of stored and of removed blocks in turns",
        value("results > stored and removed in turns, thousands/s > median",
              "{:,.0f} thousand/s")),
    Row("memory per block of a node",
        value("results > memory per block of a node, bytes > median", "{:.0f} bytes")),
    Row("a node's step that names 16 blocks: with a router that listens / without",
        ratio(_STEP.format("sent every 10 ms"), _STEP.format("nobody listens"), ".0f", " us")),
))  # fmt: skip
_SPLIT, _BOTH = ("results > 1:1+local > {}", "results > colocated:1 > {}")
_FETCHED, _PLAIN = ("results > 2:2+fetch > {}", "results > 2:2 > {}")

CHAT_PLACES = Source("chat_places", (
    Row("chats of 8 turns, 6 at a time: TTFT p50 of turn 4, split / one node that does both",
        ratio(_SPLIT.format("ttft_p50_turn_4_ms"), _BOTH.format("ttft_p50_turn_4_ms"), ".0f",
              " ms"), "<= 1.2"),
    Row("prompt tokens computed per turn from turn 4 on, split / one node that does both",
        ratio(_SPLIT.format("computed_per_later_turn"), _BOTH.format("computed_per_later_turn"),
              ".0f", "")),
    Row("turns from turn 4 on that the decode node served alone, of all such turns",
        ratio(_SPLIT.format("later_turns_alone"), _SPLIT.format("later_turns"), ".0f", "")),
    Row("2 prefill and 2 decode nodes: TTFT p50 from turn 4 on, prefixes fetched / not",
        ratio(_FETCHED.format("ttft_p50_later_ms"), _PLAIN.format("ttft_p50_later_ms"), ".0f",
              " ms")),
    Row("2 prefill and 2 decode nodes: prompt tokens computed per turn from turn 4 on, prefixes "
        "fetched / not",
        ratio(_FETCHED.format("computed_per_later_turn"), _PLAIN.format("computed_per_later_turn"),
              ".0f", "")),
))  # fmt: skip
_LOAD = "ratios > 2:2+fetch / {} > {}"


def _tokens(document: Json) -> Found:
    row = at(document, "results > 2:2+fetch")
    computed, new = number(row, "computed_per_later_turn"), number(row, "new_per_later_turn")
    return Found(f"{computed / new:.2f} ({computed:.0f} / {new:.0f})", computed / new)


def _beside_bound(other: str, name: str, bound: str) -> Callable[[Json], Found]:
    def measure(document: Json) -> Found:
        found = number(document, _LOAD.format(other, name))
        return Found(
            f"{found:.2f} (bound {number(document, _LOAD.format(other, bound)):.2f})", found
        )

    return measure


CHAT_LOAD = Source("chat_load", (
    Row("24 chats of 8 turns, 2 prefill and 2 decode nodes that fetch: prompt tokens computed per "
        "turn from turn 4 on / new tokens", _tokens),
    Row("likewise, TTFT p50 from turn 4 on, prefixes fetched / not",
        _beside_bound("2:2", "ttft_p50_later", "ttft_without_waits_at_least"), "<= 0.35"),
    Row("likewise, output tokens per second, prefixes fetched / not",
        _beside_bound("2:2", "output_tokens_per_s", "output_tokens_per_s_at_most"), ">= 1.3"),
    Row("likewise, TTFT p50 from turn 4 on, Baton with fetches / llama.cpp's server",
        value(_LOAD.format("llamacpp", "ttft_p50_later"), "{:.2f}")),
    Row("likewise, output tokens per second, Baton with fetches / llama.cpp's server",
        value(_LOAD.format("llamacpp", "output_tokens_per_s"), "{:.2f}")),
), "Turns of 1,000 input and 400 output tokens, scaled down. The bounds are those of a load that"
   " only computes prompts and never waits.",
   options="--scale 0.2 --sessions 24 --repeats 1",
   absent="it must be measured on a machine where nothing else runs")  # fmt: skip
_COST = "results > server={}, num_streams={} > cpu_us_per_token > median"
HTTP = Source("http_servers", tuple(
    Row(f"CPU per token, {num_streams} streams: aiohttp / {server}",
        ratio(_COST.format("aiohttp", num_streams), _COST.format(server, num_streams),
              ".1f", " us"))
    for server in ("uvicorn (httptools), no framework", "uvicorn (httptools), Starlette")
    for num_streams in (64, 256)
))  # fmt: skip
TLS = Source("tls_cost", (
    Row("tokens per core-second with mTLS / plain, all that nodes can",
        value("mtls_over_plain > all offered > tokens_per_core_s > median"), ">= 0.95"),
), options="--parts tls")  # fmt: skip
TRACING = Source("trace_cost", (
    Row("CPU of tracing, all requests traced: share of a request's",
        value("itself > all sampled > share", "{:.1f}%", scale=100), "<= 3 %"),
    Row("CPU of tracing that is off: share of a request's",
        value("itself > off > share", "{:.2f}%", scale=100), "<= 0.5 %"),
), options="--parts tracing")  # fmt: skip


def _own_cores(document: Json) -> Found:
    shares = at(document, "relative_to_alone")
    if "2 routers, own cores" not in shares:
        return Found("not measured: fewer than four cores")
    share = number(shares, "2 routers, own cores")
    return Found(f"{share:.2f}", share)


_OF_ALONE = "relative_to_alone > {}"
SHARING = Source("router_sharing", (
    Row("tokens per core-second of one router beside a program that computes on its core / alone",
        value(_OF_ALONE.format("beside 0 MiB"))),
    Row("tokens per core-second beside a program that reads 64 MiB again and again / alone",
        value(_OF_ALONE.format("beside 64 MiB"))),
    Row("tokens per core-second of two routers on one port and one core / one router alone",
        value(_OF_ALONE.format("2 routers, one core"))),
    Row("tokens per core-second of two routers with a core each / one router alone", _own_cores),
), options="--parts sharing",
   absent="docs/log.md has one run on a busy machine")  # fmt: skip
_NODES = "rows > 1000 nodes > {}"


def _restart(document: Json) -> Found:
    after = at(document, _NODES.format("restart_s"))
    pairs_s, blocks_s = number(after, "pairs"), number(after, "blocks")
    return Found(f"{pairs_s:.1f} s; {blocks_s:.1f} s", blocks_s)


CONTROL_PLANE = Source("control_plane", (
    Row("1,000 nodes join at once: all 250,000 pairs connected after (CPU of the router)",
        told(_NODES.format("").removesuffix(" > "), "{join_s:.1f} s ({join_cpu_s:.1f} s)")),
    Row("CPU of the router per idle node and second",
        value(_NODES.format("steady_cpu_ms_per_node_and_s"), "{:.2f} ms")),
    Row("memory of the router per node, with 500 peers each",
        value(_NODES.format("rss_kib_per_node"), "{:.0f} KiB")),
    Row("memory of the router per cached block",
        value(_NODES.format("rss_bytes_per_block"), "{:.0f} bytes")),
    Row("the router restarts: all pairs, and 2 million cached blocks, known again after",
        _restart, "<= 5 s",
        "half of the two cores' time is taken by the simulated nodes; of the router's half, most"
        " goes into 1,000 connections, beats, and the index of blocks (log)."),
), "One process simulates all nodes, on the cores that the router has, too.",
   absent="not measured yet with 1,000 nodes and a restart; docs/log.md has figures")  # fmt: skip
SUBJECT = Subject(
    "The router",
    (
        Measurement(
            "router.router_cost",
            "router/calls router/intake baton/serving baton/link baton/access baton/telemetry",
            (ROUTER, TLS, TRACING, SHARING),
        ),
        Measurement("router.control_plane", "router/fleet baton/link baton/wire", (CONTROL_PLANE,)),
        Measurement("router.prefix_index", "router/fleet", (PREFIX_INDEX,)),
        Measurement("router.chat_places", "router/policies router/fleet", (CHAT_PLACES, CHAT_LOAD)),
        Measurement("router.http_servers", "baton/serving", (HTTP,)),
    ),
    log=(
        "2026-11-21: what a router costs",
        "2026-11-21: an index of all nodes' prefix caches at the router",
        "2026-11-21: a streamed token over HTTP, on aiohttp and on uvicorn",
    ),
)
