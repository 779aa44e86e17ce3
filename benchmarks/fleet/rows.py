"""Rows of docs/performance.md about placement and routing policies, in simulated fleets."""

from __future__ import annotations

from benchmarks.page.measures import at, number, value
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject


def _placement(num_nodes: int, target: str = "") -> Row:
    def measure(document: Json) -> Found:
        row = at(document, f"results > cost > {num_nodes}")
        p50, p99, cpu = (number(row, name) / 1e3 for name in ("p50_us", "p99_us", "cpu_p99_us"))
        text = f"{p99:.3f} ms (median {p50:.3f} ms; p99 of CPU time {cpu:.3f} ms)"
        return Found(text, p99)

    return Row(
        f"a placement by cost among {num_nodes} nodes, p99 of wall time",
        measure,
        target,
        "wall time includes the time in which other processes had the core.",
    )


PLACEMENT = Source("placement", (_placement(16), _placement(64), _placement(512, "<= 1 ms")))


def _policies(num_nodes: int, traffic: str) -> Row:
    label = f"{num_nodes}+{num_nodes}, {traffic}"

    def measure(document: Json) -> Found:
        rows = at(document, "results", label)
        cost = at(rows, "cost")
        others = [row for name, row in rows.items() if not name.startswith("cost")]
        p50, p99, tpot = (
            number(cost, name) / min(number(row, name) for row in others)
            for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms")
        )
        good, best = (100 * max(number(row, "goodput") for row in o) for o in ([cost], others))
        lost = at(document, "lost", label)
        text = f"{p50:.2f}, {p99:.2f}; {good:.0f} against {best:.0f} %; {tpot:.1f}"
        return Found(text + (f" (loses {lost})" if lost else ""), not lost)

    return Row(
        label,
        measure,
        "wins or ties",
        "the cause was not investigated. Prompts that a decode node computes share steps with its"
        " decodes, which may be the cause.",
    )


POLICIES = Source(
    "policies",
    tuple(
        _policies(num_nodes, traffic)
        for num_nodes in (8, 32, 64, 256)
        for traffic in ("shared prefix", "multi-turn", "bursty", "mixed")
    ),
    "Policy cost compared with the best other policy of each metric, in simulated fleets on"
    " virtual time. The figures: TTFT p50 and p99 divided by the best; share of requests within"
    " the limits (TTFT 2 s, TPOT 40 ms), with cost and with the best; TPOT p99 divided by the best,"
    " which is **what cost pays** and not part of the target. A tie is within 3 %. Other load on"
    " the machine does not change these numbers.",
)


def _simulator(document: Json) -> Found:
    texts = (
        f"{number(row, 'cpu_us_per_token'):.1f} us ({number(row, 'num_nodes'):g} nodes)"
        for row in at(document, "rows")
    )
    return Found(", ".join(texts))


SIMULATOR = Source("simulator", (Row("CPU of the simulator per token", _simulator),))
FAIR_SHARE = Source("fair_share_virtual", (
    Row("TTFT p99 of other tenants, while one sends ten times its share / without that one",
        value("ratio", "{:.2f}"), "<= 1.2"),
), options="--parts virtual")  # fmt: skip
PINNED_SESSIONS = Source(
    "pinned_sessions",
    (
        Row(
            "TTFT p50 of pinned agents after a pause, in which others fill the memory 3 times /"
            " without others",
            value("ratios > pinned_ttft_p50_to_alone", "{:.2f}"),
            "<= 1.2",
        ),
        Row(
            "the same without pins",
            value("ratios > unpinned_ttft_p50_to_alone", "{:.2f}"),
        ),
        Row(
            "TTFT p99 of the others, with pins / without pins",
            value("ratios > others_ttft_p99_to_no_pins", "{:.2f}"),
            "<= 1.1",
        ),
    ),
)
SUBJECT = Subject(
    "Placement and policies",
    (
        Measurement("fleet.placement", "router/policies router/fleet", (PLACEMENT,)),
        Measurement("fleet.policies", "router/policies router/fleet sim_node", (POLICIES,)),
        Measurement("fleet.simulator", "sim_node", (SIMULATOR,)),
        Measurement("fleet.fair_share", "router/gate", (FAIR_SHARE,)),
        Measurement("fleet.pinned_sessions", "engine/core/pins", (PINNED_SESSIONS,)),
    ),
    log=(
        "2026-11-21: policies over simulated fleets on virtual time, and two flaws of cost",
        "2026-11-21: placing by cost, against five other policies",
    ),
)
