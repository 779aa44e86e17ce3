"""Rows of docs/performance.md about faults and overload: what requests get when nodes die."""

from __future__ import annotations

from benchmarks.page.measures import at, count, number
from benchmarks.page.rows import Found, Json, Measure, Measurement, Row, Source, Subject


def _promises(document: Json) -> Found:
    drills = at(document, "drills")
    broken = sum(bool(at(drill, "broken")) for drill in drills.values())
    return Found(f"{len(drills) - broken} of {len(drills)} drills", not broken and len(drills) > 0)


def _largest(what: str, name: str, target: str = "") -> Row:
    def measure(document: Json) -> Found:
        drills = at(document, "drills").values()
        found = max(number(drill, name) for drill in drills if at(drill, name) is not None)
        return Found(f"{found:.2f} s", found)

    return Row(what, measure, target)


CHAOS = Source("chaos", (
    Row("0 hung, 0 lost, 0 wrong tokens, 0 blocks held, nobody else died", _promises,
        "in all drills", "the file names the promise that broke, and in which drill."),
    _largest("a death or stop is noticed after, at most", "detection_s", "<= 2 s"),
    _largest("longest pause of a stream", "recovery_s"),
    _largest("every block is free again after, at most", "free_after_s"),
), "Real processes killed, stopped and restarted under load, also at the protocol's"
   " arrows.")  # fmt: skip


def _no_errors(document: Json) -> Found:
    drills = at(document, "drills").values()
    errors, requests = (
        sum(int(number(drill, name)) for drill in drills) for name in ("errors", "requests")
    )
    seeds = min(int(number(drill, "seeds")) for drill in drills)
    return Found(f"{errors} of {requests} requests, {seeds} seeds", errors == 0)


STAND_STILL = Source(
    "stand_still",
    (
        Row("requests that end with an error", _no_errors, "none"),
        _largest("longest pause of a stream", "longest_pause_s"),
    ),
    "A node stands still for 0.5, 3 and 10 s, or two die within a second, under load.",
)


def _wrong_tokens(document: Json) -> Found:
    num_wrong, num_tokens = number(document, "wrong_tokens"), number(document, "tokens")
    return Found(f"{num_wrong:.0f} of {num_tokens:.0f}", num_wrong == 0 and num_tokens >= 10_000)


FOREIGN_NODE = Source(
    "foreign_node",
    (Row("served tokens that differ from those of one process", _wrong_tokens, "none"),),
    "A node with other weights joins first, joins last, is drained, or stays alone.",
)


def _deaths(document: Json) -> Found:
    row = at(document, "deaths")
    requests, complete, nodes = (number(row, one) for one in ("requests", "complete", "deaths"))
    text = f"{complete:,.0f} of {requests:,.0f} ({nodes:,.0f} deaths)"
    return Found(text, 0 < complete == requests)


def _open_after(document: Json) -> Found:
    found = sum(
        number(document, place)
        for place in (
            *("deaths > open_requests_after", "deaths > open_legs_after"),
            *("overload > queued_after", "overload > open_legs_after"),
        )
    )
    return Found(f"{found:.0f}", found)


def _memory_of_deaths(document: Json) -> Found:
    mib = at(document, "deaths > router_rss_mib")
    growth = number(mib, "-1") / number(mib, "0")
    return Found(f"{growth:.2f} ({mib[0]} -> {mib[-1]} MiB)", growth)


def _kept(document: Json) -> Found:
    row, least = at(document, "overload > overload"), number(document, "sizes > least_kept")
    share, kept = number(row, "kept_share"), number(row, "kept")
    return Found(f"{100 * share:.1f} % ({kept:,.0f})", share >= least)


def _refusals(document: Json) -> Found:
    row = at(document, "overload > overload")
    limit_ms = number(document, "sizes > refusal_limit_s") * 1e3
    refused, p50, p99 = (
        number(row, name) for name in ("refused", "refusal_ms_p50", "refusal_ms_p99")
    )
    text = f"{refused:,.0f}; median {p50:.1f} ms, p99 {p99:.1f} ms"
    return Found(text, refused > 0 and p99 <= limit_ms)


RESILIENCE = Source("resilience", (
    Row("requests complete and right while 1,000 nodes die", _deaths, "all",
        "where processes get the core too late, nodes are taken for silent, and"
        " attempts last longer than nodes live: the log has a run in which all came through,"
        " and one on a busy machine in which 72 % did."),
    Row("requests, legs and queue entries left", _open_after, "0"),
    Row("the router's memory after the deaths / at their beginning", _memory_of_deaths,
        "flat: <= 1.05",
        "the router keeps placements and their reasons up to a limit that this short run"
        " does not reach; it frees those of dead nodes (log)."),
    Row("deadlines kept of requests accepted at 3 times the capacity", _kept, "all",
        "the gate estimates; on a busy machine the estimates come late (log: 98.8 %"
        " alone, 91 % while other runs used the machine)."),
    Row("refusals then, and how soon", _refusals, "some, p99 <= 50 ms",
        "the whole router process pauses as the machine's load comes and goes (log);"
        " and where nothing was refused there was no gate to measure."),
), "A real router process over simulated nodes; the router, the nodes and the client are"
   " three processes on two cores.")  # fmt: skip
OVERLOAD_VIRTUAL = Source(
    "overload_virtual",
    (Row("promises broken at 3 times the capacity, on virtual time", count("problems"), "0"),),
)


def _of_names(drill: str, *places: str, least: tuple[str, int]) -> Measure:
    """Make the row of a drill: counts that must be 0, and its number of requests.

    Args:
        least: name of a further count, and the minimum value that this count must have.
    """

    def measure(document: Json) -> Found:
        row = at(document, drill)
        counts = [int(number(row, place)) for place in places]
        enough, wanted = number(row, least[0]), least[1]
        times = "" if least[0] == "requests" else f", {enough:.0f} {least[0]}"
        text = f"{', '.join(map(str, counts))} of {number(row, 'requests'):,.0f} requests{times}"
        return Found(text, not any(counts) and enough >= wanted)

    return measure


def _slowest_refusal(document: Json) -> Found:
    rows = at(document, "refusals").values()
    p95, slowest = (max(number(row, name) for row in rows) for name in ("p95_ms", "max_ms"))
    return Found(f"{p95:.1f} ms; at most {slowest:.1f} ms", p95)


MANY_NAMES = Source("many_names", (
    Row("an alias is switched under load: answers of the wrong version, failed, lost, prefix hits"
        " across versions",
        _of_names("switches", "wrong", "failed", "lost", "hits_across_versions",
                  least=("switches", 100)),
        "none, 100 switches"),
    Row("an adapter is unloaded under load: answers of the base model, wrong, failed",
        _of_names("unloads", "of_base", "wrong", "failed", least=("unloads", 10)), "none"),
    Row("a node of each base model is killed twice: answers of another model, failed, lost",
        _of_names("kills", "wrong", "failed", "lost", least=("requests", 2000)),
        "none, 2,000 requests"),
    Row("an unknown name, and a name without nodes, are refused after (95th percentile)",
        _slowest_refusal, "<= 50 ms",
        "client, router and nodes share two cores with other work."),
), "Real processes: two base models and three adapters behind one address, two slots for adapters"
   " on each node. Each answer is compared with that of one process.")  # fmt: skip


def _soak_promises(document: Json) -> Found:
    broken, requests = at(document, "broken"), sum(at(document, "requests").values())
    return Found(f"{len(broken)} broken, {requests:,} requests", not broken)


def _soak_growth(document: Json) -> Found:
    grown, quarters = at(document, "grown"), at(document, "quarter_medians")
    sizes = [
        "{} {:.1f} -> {:.1f}".format(name, *quarters[name]["resident_mib"][2:])
        for name in ("router", "p0", "d0")
    ]
    return Found(f"{len(grown)} figures; MiB: {', '.join(sizes)}", not grown)


SOAK = Source(
    "soak",
    (
        Row("no request hung, lost or wrong; at the end, no block held and none without owner",
            _soak_promises, "0 broken"),
        Row("memory, descriptors and threads that grew from the third to the fourth quarter, and"
            " peaks of descriptors",
            _soak_growth, "none (4 MiB, 2, 1; 15)"),
    ),
    "Hosts of their own on one machine; a fault every 20 s: kills, stops, cuts of the network.",
)  # fmt: skip


def _partition_promises(document: Json) -> Found:
    rows = at(document, "rows")
    num_broken = sum(bool(at(row, "broken")) for row in rows)
    num_requests = sum(sum(at(row, "counts").values()) for row in rows)
    seeds = {at(row, "seed") for row in rows}
    text = f"{num_broken} of {len(rows)} faults, {num_requests:,} requests, {len(seeds)} seeds"
    return Found(text, not num_broken and len(rows) > 0)


def _slowest_recovery(document: Json) -> Found:
    found = [
        number(row, "recovered_after_s") for row in at(document, "rows") if not at(row, "restarts")
    ]
    return Found(f"{max(found):.2f} s", max(found))


def _pauses(document: Json) -> Found:
    """Return the longest pause by length of the fault, if the fault does not cut off the client."""
    longest: dict[float, float] = {}
    for row in at(document, "rows"):
        if "client" not in at(row, "fault") and not at(row, "restarts"):
            seconds = number(row, "seconds")
            pause_s = number(row, "longest_pause_s")
            longest[seconds] = max(longest.get(seconds, 0.0), pause_s)
    return Found("; ".join(f"{s:g} s: {pause:.1f} s" for s, pause in sorted(longest.items())))


PARTITIONS = Source(
    "partitions",
    (
        Row("faults after which a request was hung, wrong or lost, a block held, or a program"
            " ended", _partition_promises, "none"),
        Row("all pairs of nodes connected after the end of a fault, at most", _slowest_recovery,
            "<= 2 s"),
        Row("longest pause of a request, by the fault's length", _pauses),
    ),
    "Programs run on hosts of their own on one machine. The faults are cuts of one direction,"
    " stops, wrong clocks, full disks, no free descriptors, wrong addresses and moved addresses.",
)  # fmt: skip
SUBJECT = Subject(
    "Faults and overload",
    (
        Measurement(
            "faults.chaos",
            "kvconnector prefill_node decode_node node_runtime router/calls",
            (CHAOS,),
        ),
        Measurement("faults.stand_still", "kvconnector node_runtime router/calls", (STAND_STILL,)),
        Measurement("faults.foreign_node", "router/fleet kvconnector", (FOREIGN_NODE,)),
        Measurement("faults.resilience", "router/gate router/calls sim_node", (RESILIENCE,)),
        Measurement(
            "faults.overload_virtual", "router/gate router/calls sim_node", (OVERLOAD_VIRTUAL,)
        ),
        Measurement(
            "faults.many_names",
            "router/names router/fleet/adapter_places.py router/api/admin/adapters.py"
            " node_runtime/adapters/adapter_queue.py engine/adapters.py",
            (MANY_NAMES,),
        ),
        Measurement("hosts.soak", "kvconnector node_runtime router/calls router/fleet", (SOAK,)),
        Measurement(
            "hosts.partitions",
            "kvconnector node_runtime router/calls router/fleet",
            (PARTITIONS,),
        ),
        Measurement("faults.innocents", "router/calls kvconnector"),
        Measurement("faults.innocents_virtual", "router/calls sim_node"),
        Measurement("faults.long_run", "kvconnector node_runtime router/calls"),
    ),
    log=(
        "2026-11-29: names switched, unloaded, and their nodes killed, under load",
        "2026-11-21: nodes killed, stopped and restarted under load",
        "2026-11-21: a dead sender's last bytes",
        "2026-11-21: mistakes planted before the whole-system machine",
        "2026-11-21: 1,000 dead nodes, and three times too much load",
    ),
)
