"""Rows about routers and fleets: cost of a router, placement, deaths, overload, simulation."""

from __future__ import annotations

import statistics

from tools.performance.rows import Area, Found, Json, Row, Source, at, number, ratio, value

TIMES_RELAY = 3.0
FLAT = 1.05  # memory at the end / at the beginning
MOST_PLACEMENT_MS = 1.0
MOST_MATCH_US = 300.0


# ---------------------------------------------------------------- one router


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
        what=f"tokens per core-second, router / bare gRPC relay, offered {load}",
        target=f">= {TIMES_RELAY:g}" if is_limit else "",
        measure=measure,
        holds_back="a message to a client costs gRPC the same with one token as with a hundred.",
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
    name="router_cost",
    command="benchmarks/router_cost.py",
    intro="One router on a core of its own, 256 streams, against a relay that does nothing else.",
    rows=(
        *(_against_relay(offered) for offered in (2_000, 20_000, 60_000, "all")),
        Row(what="CPU per token at 2,000 / 20,000 / 60,000 / all", measure=_cpu_per_token),
        Row(what="CPU per request (of so many tokens)", measure=_cpu_per_request),
        Row(what="streams held open that say nothing", measure=_held),
        Row(
            what="memory after many requests / before",
            target=f"flat: <= {FLAT}",
            measure=_memory,
        ),
        Row(
            what="tokens per core-second, two routers on one port and one core / one router",
            target="> 1",
            measure=_two_routers,
            holds_back="two that share one core each see it half idle and merge fewer tokens per"
            " message; with a core each it is not measured.",
        ),
    ),
)


def _placement(num_nodes: int) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "results", "cost", str(num_nodes))
        p50, p99, cpu = (number(row, name) for name in ("p50_us", "p99_us", "cpu_p99_us"))
        text = (
            f"{p99 / 1e3:.3f} ms (median {p50 / 1e3:.3f} ms; of the processor {cpu / 1e3:.3f} ms)"
        )
        return Found(text, p99 <= MOST_PLACEMENT_MS * 1e3 if num_nodes == 512 else None)

    return Row(
        what=f"a placement by cost among {num_nodes} nodes, p99 by the wall",
        target=f"<= {MOST_PLACEMENT_MS:g} ms" if num_nodes == 512 else "",
        measure=measure,
        holds_back="by the wall it also counts whoever else had the core.",
    )


PLACEMENT = Source(
    name="placement",
    command="benchmarks/placement.py",
    rows=tuple(_placement(num_nodes) for num_nodes in (16, 64, 512)),
)
PREFIX_INDEX = Source(
    name="prefix_index",
    command="benchmarks/prefix_index.py",
    rows=(
        Row(
            what="who has a prompt of 16,000 tokens, among 512 nodes with 2 million blocks",
            target=f"<= {MOST_MATCH_US:g} us",
            measure=value(
                "results",
                "match 16,000 tokens: 10 nodes have much, all a little, us",
                "median",
                form="{:.0f} us",
                most=MOST_MATCH_US,
            ),
            holds_back="most of the time is in cache misses (log).",
        ),
        Row(
            what="events taken, stored and removed in turns",
            measure=value(
                *("results", "stored and removed in turns, thousands/s", "median"),
                form="{:,.0f} thousand/s",
            ),
        ),
        Row(
            what="memory per block of a node",
            measure=value(
                *("results", "memory per block of a node, bytes", "median"), form="{:.0f} bytes"
            ),
        ),
        Row(
            what="a node's step that names 16 blocks: with a router that listens / without",
            measure=ratio(
                ("results", "a node's step that names 16 blocks, sent every 10 ms, us", "median"),
                ("results", "a node's step that names 16 blocks, nobody listens, us", "median"),
                form="{ratio:.2f} ({above:.0f} / {under:.0f} us)",
            ),
        ),
    ),
)


# ---------------------------------------------------------------- policies


def _policies(num_nodes: int, traffic: str) -> Row:
    label = f"{num_nodes}+{num_nodes}, {traffic}"

    def measure(document: Json) -> Found:
        rows = at(document, "results", label)
        cost = at(rows, "cost")
        others = [row for name, row in rows.items() if not name.startswith("cost")]
        p50, p99 = (
            number(cost, name) / min(number(row, name) for row in others)
            for name in ("ttft_p50_ms", "ttft_p99_ms")
        )
        good, best = (100 * max(number(row, "goodput") for row in o) for o in ([cost], others))
        tpot = number(cost, "tpot_p99_ms") / min(number(row, "tpot_p99_ms") for row in others)
        lost = at(document, "lost", label)
        text = f"{p50:.2f}, {p99:.2f}; {good:.0f} against {best:.0f} %; {tpot:.1f}"
        return Found(text + (f" (loses {lost})" if lost else ""), not lost)

    return Row(
        what=label,
        target="wins or ties",
        measure=measure,
        holds_back="not looked into; prompts computed on D share its steps with those that decode.",
    )


POLICIES = Source(
    name="policies",
    command="benchmarks/policies.py",
    intro="Policy cost against the best of the others, metric by metric, in simulated fleets on"
    " virtual time: TTFT p50 and p99 as a multiple of the best; within the limits (TTFT 2 s, TPOT"
    " 40 ms); TPOT p99 as a multiple of the best, which is **what cost pays** and no part of the"
    " target. A tie is within 3 %. The same numbers come however busy the machine.",
    rows=tuple(
        _policies(num_nodes, traffic)
        for num_nodes in (8, 32, 64, 256)
        for traffic in ("shared prefix", "multi-turn", "bursty", "mixed")
    ),
)


# ---------------------------------------------------------------- drills


def _deaths(document: Json) -> Found:
    row = at(document, "deaths")
    requests, complete = number(row, "requests"), number(row, "complete")
    nodes = number(row, "deaths")
    return Found(
        f"{complete:,.0f} of {requests:,.0f} ({nodes:,.0f} deaths)", 0 < complete == requests
    )


def _open_after(document: Json) -> Found:
    found = number(document, "deaths", "open_requests_after")
    found += number(document, "deaths", "open_legs_after")
    found += number(document, "overload", "queued_after")
    found += number(document, "overload", "open_legs_after")
    return Found(f"{found:.0f}", found == 0)


def _memory_of_deaths(document: Json) -> Found:
    mib = at(document, "deaths", "router_rss_mib")
    growth = number(mib, -1) / number(mib, 0)
    return Found(f"{growth:.2f} ({mib[0]} -> {mib[-1]} MiB)", growth <= FLAT)


def _kept(document: Json) -> Found:
    row, least = at(document, "overload", "overload"), number(document, "sizes", "least_kept")
    share, kept = number(row, "kept_share"), number(row, "kept")
    return Found(f"{100 * share:.1f} % ({kept:,.0f})", share >= least)


def _refusals(document: Json) -> Found:
    row = at(document, "overload", "overload")
    limit_ms = number(document, "sizes", "refusal_limit_s") * 1e3
    refused, p99 = number(row, "refused"), number(row, "refusal_ms_p99")
    p50 = number(row, "refusal_ms_p50")
    text = f"{refused:,.0f}; median {p50:.1f} ms, p99 {p99:.1f} ms"
    return Found(text, refused > 0 and p99 <= limit_ms)


RESILIENCE = Source(
    name="resilience",
    command="benchmarks/resilience.py",
    intro="A real router process over simulated nodes; the router, the nodes and the client are"
    " three processes on two cores.",
    rows=(
        Row(
            what="requests complete and right while 1,000 nodes die",
            target="all",
            measure=_deaths,
            holds_back="where processes get the core too late, nodes are taken for silent, and"
            " attempts last longer than nodes live: the log has a run in which all came through,"
            " and one on a busy machine in which 72 % did.",
        ),
        Row(what="requests, legs and queue entries left", target="0", measure=_open_after),
        Row(
            what="the router's memory after the deaths / at their beginning",
            target=f"flat: <= {FLAT}",
            measure=_memory_of_deaths,
            holds_back="what nodes were sent, and why, is remembered up to a bound that so short a"
            " run does not reach; dead nodes' share is given back (log).",
        ),
        Row(
            what="deadlines kept of requests accepted at 3 times the capacity",
            target="all",
            measure=_kept,
            holds_back="the gate estimates; on a busy machine the estimates come late (log: 98.8 %"
            " alone, 91 % with other runs beside it).",
        ),
        Row(
            what="refusals then, and how soon",
            target="some, p99 <= 50 ms",
            measure=_refusals,
            holds_back="the whole router process pauses as the machine's load comes and goes (log);"
            " and where nothing was refused there was no gate to measure.",
        ),
    ),
)


# ---------------------------------------------------------------- simulation, HTTP


def _simulator(document: Json) -> Found:
    rows = at(document, "rows")
    texts = (
        f"{number(row, 'cpu_us_per_token'):.1f} us ({number(row, 'num_nodes'):g} nodes)"
        for row in rows
    )
    return Found(", ".join(texts))


SIMULATOR = Source(
    name="simulator",
    command="benchmarks/simulator.py",
    rows=(Row(what="CPU of the simulator per token", measure=_simulator),),
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

    return Row(what=f"CPU per token, {num_streams} streams: aiohttp / {server}", measure=measure)


HTTP = Source(
    name="http_servers",
    command="benchmarks/http_servers.py",
    rows=tuple(
        _http(f"uvicorn (httptools), {framework}", num_streams)
        for framework in ("no framework", "Starlette")
        for num_streams in (64, 256)
    ),
)

AREAS = (
    Area(
        title="The router",
        sources=(ROUTER, PLACEMENT, PREFIX_INDEX, HTTP),
        log=(
            "2026-11-21: what a router costs",
            "2026-11-21: an index of all nodes' prefix caches at the router",
            "2026-11-21: a streamed token over HTTP, on aiohttp and on uvicorn",
        ),
    ),
    Area(
        title="Policies",
        sources=(POLICIES, SIMULATOR),
        log=(
            "2026-11-21: policies over simulated fleets on virtual time, and two flaws of cost",
            "2026-11-21: placing by cost, against five other policies",
        ),
    ),
    Area(
        title="Deaths and overload",
        sources=(RESILIENCE,),
        log=("2026-11-21: 1,000 dead nodes, and three times too much load",),
    ),
)
