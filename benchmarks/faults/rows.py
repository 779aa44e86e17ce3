"""Rows of the page about faults and overload: what becomes of requests when nodes die."""

from __future__ import annotations

from benchmarks.page.rows import (
    Found,
    Json,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    count,
    number,
)

MOST_DETECTION_S = 2.0


def _promises(document: Json) -> Found:
    drills = at(document, "drills")
    broken = sum(bool(at(drill, "broken")) for drill in drills.values())
    return Found(f"{len(drills) - broken} of {len(drills)} drills", not broken and len(drills) > 0)


def _largest(name: str, most: float | None = None) -> Row:
    words = {
        "detection_s": "a death or stop is noticed after, at most",
        "recovery_s": "longest pause of a stream",
        "free_after_s": "every block is free again after, at most",
    }

    def measure(document: Json) -> Found:
        drills = at(document, "drills").values()
        seconds = [number(drill, name) for drill in drills if at(drill, name) is not None]
        found = max(seconds)
        return Found(f"{found:.2f} s", None if most is None else found <= most)

    return Row(words[name], measure, f"<= {most:g} s" if most else "")


CHAOS = Source(
    "chaos",
    (
        Row(
            "0 hung, 0 lost, 0 wrong tokens, 0 blocks held, nobody else died",
            _promises,
            "in all drills",
            "the file names the promise that broke, and in which drill.",
        ),
        _largest("detection_s", MOST_DETECTION_S),
        _largest("recovery_s"),
        _largest("free_after_s"),
    ),
    "Real processes killed, stopped and restarted under load, also at the protocol's arrows.",
)


def _no_errors(document: Json) -> Found:
    drills = at(document, "drills").values()
    num_errors = sum(int(number(drill, "errors")) for drill in drills)
    num_requests = sum(int(number(drill, "requests")) for drill in drills)
    seeds = min(int(number(drill, "seeds")) for drill in drills)
    return Found(f"{num_errors} of {num_requests} requests, {seeds} seeds", num_errors == 0)


def _longest_pause(document: Json) -> Found:
    drills = at(document, "drills").values()
    return Found(f"{max(number(drill, 'longest_pause_s') for drill in drills):.2f} s")


STAND_STILL = Source(
    "stand_still",
    (
        Row("requests that end with an error", _no_errors, "none"),
        Row("longest pause of a stream", _longest_pause),
    ),
    "A node stands still for 0.5, 3 and 10 s, or two die within a second, under load.",
)


def _wrong_tokens(document: Json) -> Found:
    num_wrong, num_tokens = number(document, "wrong_tokens"), number(document, "tokens")
    return Found(f"{num_wrong:.0f} of {num_tokens:.0f}", num_wrong == 0 and num_tokens >= 10_000)


FOREIGN_NODE = Source(
    "foreign_node",
    (Row("tokens that are not of one process", _wrong_tokens, "none"),),
    "A node with other weights joins first, joins last, is drained, or stays alone.",
)


FLAT = 1.05  # memory at the end / at the beginning


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
    "resilience",
    (
        Row(
            "requests complete and right while 1,000 nodes die",
            _deaths,
            "all",
            "where processes get the core too late, nodes are taken for silent, and"
            " attempts last longer than nodes live: the log has a run in which all came through,"
            " and one on a busy machine in which 72 % did.",
        ),
        Row("requests, legs and queue entries left", _open_after, "0"),
        Row(
            "the router's memory after the deaths / at their beginning",
            _memory_of_deaths,
            f"flat: <= {FLAT}",
            "what nodes were sent, and why, is remembered up to a bound that so short a"
            " run does not reach; dead nodes' share is given back (log).",
        ),
        Row(
            "deadlines kept of requests accepted at 3 times the capacity",
            _kept,
            "all",
            "the gate estimates; on a busy machine the estimates come late (log: 98.8 %"
            " alone, 91 % with other runs beside it).",
        ),
        Row(
            "refusals then, and how soon",
            _refusals,
            "some, p99 <= 50 ms",
            "the whole router process pauses as the machine's load comes and goes (log);"
            " and where nothing was refused there was no gate to measure.",
        ),
    ),
    "A real router process over simulated nodes; the router, the nodes and the client are"
    " three processes on two cores.",
)


OVERLOAD_VIRTUAL = Source(
    "overload_virtual",
    (Row("promises broken at 3 times the capacity, on virtual time", count("problems"), "0"),),
)
SUBJECT = Subject(
    "Faults and overload",
    (
        Measurement(
            "benchmarks.faults.chaos",
            "kvconnector prefill_node decode_node node_runtime router/calls",
            (CHAOS,),
        ),
        Measurement(
            "benchmarks.faults.stand_still", "kvconnector node_runtime router/calls", (STAND_STILL,)
        ),
        Measurement("benchmarks.faults.foreign_node", "router/fleet kvconnector", (FOREIGN_NODE,)),
        Measurement(
            "benchmarks.faults.resilience", "router/gate router/calls sim_node", (RESILIENCE,)
        ),
        Measurement(
            "benchmarks.faults.overload_virtual",
            "router/gate router/calls sim_node",
            (OVERLOAD_VIRTUAL,),
        ),
        Measurement("benchmarks.faults.innocents", "router/calls kvconnector"),
        Measurement("benchmarks.faults.innocents_virtual", "router/calls sim_node"),
        Measurement("benchmarks.faults.long_run", "kvconnector node_runtime router/calls"),
    ),
    log=(
        "2026-11-21: nodes killed, stopped and restarted under load",
        "2026-11-21: a dead sender's last bytes",
        "2026-11-21: mistakes planted before the whole-system machine",
        "2026-11-21: 1,000 dead nodes, and three times too much load",
    ),
)
