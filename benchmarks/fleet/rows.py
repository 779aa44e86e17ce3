"""Rows of the page about placement and policies, in simulated fleets."""

from __future__ import annotations

from benchmarks.page.rows import (
    Found,
    Json,
    Measurement,
    Row,
    Source,
    Subject,
    at,
    number,
    value,
)

MOST_PLACEMENT_MS = 1.0


def _placement(num_nodes: int) -> Row:
    def measure(document: Json) -> Found:
        row = at(document, "results", "cost", str(num_nodes))
        p50, p99, cpu = (number(row, name) for name in ("p50_us", "p99_us", "cpu_p99_us"))
        text = (
            f"{p99 / 1e3:.3f} ms (median {p50 / 1e3:.3f} ms; of the processor {cpu / 1e3:.3f} ms)"
        )
        return Found(text, p99 <= MOST_PLACEMENT_MS * 1e3 if num_nodes == 512 else None)

    return Row(
        f"a placement by cost among {num_nodes} nodes, p99 by the wall",
        measure,
        f"<= {MOST_PLACEMENT_MS:g} ms" if num_nodes == 512 else "",
        "by the wall it also counts whoever else had the core.",
    )


PLACEMENT = Source("placement", tuple(_placement(num_nodes) for num_nodes in (16, 64, 512)))


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
        label,
        measure,
        "wins or ties",
        "not looked into; prompts computed on D share its steps with those that decode.",
    )


POLICIES = Source(
    "policies",
    tuple(
        _policies(num_nodes, traffic)
        for num_nodes in (8, 32, 64, 256)
        for traffic in ("shared prefix", "multi-turn", "bursty", "mixed")
    ),
    "Policy cost against the best of the others, metric by metric, in simulated fleets on"
    " virtual time: TTFT p50 and p99 as a multiple of the best; within the limits (TTFT 2 s, TPOT"
    " 40 ms); TPOT p99 as a multiple of the best, which is **what cost pays** and no part of the"
    " target. A tie is within 3 %. The same numbers come however busy the machine.",
)


def _simulator(document: Json) -> Found:
    rows = at(document, "rows")
    texts = (
        f"{number(row, 'cpu_us_per_token'):.1f} us ({number(row, 'num_nodes'):g} nodes)"
        for row in rows
    )
    return Found(", ".join(texts))


SIMULATOR = Source("simulator", (Row("CPU of the simulator per token", _simulator),))


FAIR_SHARE = Source(
    "fair_share_virtual",
    (
        Row(
            "TTFT p99 of others beside a tenant at ten times its share / alone",
            value("ratio", form="{:.2f}", most=1.2),
            "<= 1.2",
        ),
    ),
    options="--parts virtual",
)
SUBJECT = Subject(
    "Placement and policies",
    (
        Measurement("benchmarks.fleet.placement", "router/policies router/fleet", (PLACEMENT,)),
        Measurement(
            "benchmarks.fleet.policies", "router/policies router/fleet sim_node", (POLICIES,)
        ),
        Measurement("benchmarks.fleet.simulator", "sim_node", (SIMULATOR,)),
        Measurement(
            "benchmarks.fleet.prefill_estimate", "router/policies router/fleet/load sim_node"
        ),
        Measurement("benchmarks.fleet.beside_decodes", "router/policies sim_node engine/core"),
        Measurement("benchmarks.fleet.fair_share", "router/gate", (FAIR_SHARE,)),
    ),
    log=(
        "2026-11-21: policies over simulated fleets on virtual time, and two flaws of cost",
        "2026-11-21: placing by cost, against five other policies",
    ),
)
