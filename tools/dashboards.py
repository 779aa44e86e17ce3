"""Makes Grafana dashboards from the table of panels below: `python -m tools.dashboards --write`.

The table contains names of metrics, which docs/metrics.md and docs/openai_api.md explain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

FOLDER = Path(__file__).parents[1] / "deploy" / "observability" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_R = 'job=~"$router_job"'
_N = 'role=~"$role", node=~"$node"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard; ``queries``: name of a line in the plot -> its PromQL query.

    Attributes:
        says: the panel's description, as Grafana shows it.
        unit: Grafana's name of the unit.
        is_number: whether the panel shows the last value as a number; false: it shows lines over
            time.
    """

    title: str
    queries: dict[str, str]
    says: str
    unit: str = "short"
    is_number: bool = False


def _quantiles(metric: str, labels: str) -> dict[str, str]:
    rate = f"sum by (le) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return {f"p{q}": f"histogram_quantile(0.{q}, {rate})" for q in (50, 90, 99)}


def _rate(metric: str, labels: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def _ratio(above: str, below: str) -> str:
    """Return a query that divides two rates of each node, except where the second is 0."""
    return f"{_rate(above, _N, 'node')} / ({_rate(below, _N, 'node')} > 0)"


def _share(above: str | tuple[str, ...], peak: str) -> str:
    """Return a query that divides the sum of a node's rates by the node's peak rate."""
    names = (above,) if isinstance(above, str) else above
    rates = " + ".join(_rate(name, _N, "node") for name in names)
    return f"({rates}) / sum by (node) ({peak}{{{_N}}})"


Rows: TypeAlias = dict[str, tuple[Panel, ...]]  # title of a row -> the row's panels

FLEET: Rows = {
    "Now": (
        Panel("Requests open", {"open": f"sum(baton_router_requests_open{{{_R}}})"},
              "Waiting and running, over all routers.", is_number=True),
        Panel("Requests queued", {"queued": f"sum(baton_router_requests_queued{{{_R}}})"},
              "Waiting at routers for nodes to have room.", is_number=True),
        Panel("Nodes ready",
              {"{{role}}": f'max by (role) (baton_router_nodes{{state="ready", {_R}}})'},
              "Nodes that requests can go to.", is_number=True),
        Panel("Output tokens per second",
              {"tokens": _rate("baton_router_output_tokens_total", _R, "job")},
              "Over finished requests.", is_number=True),
    ),
    "Requests": (
        Panel("Ends", {"{{outcome}}": _rate("baton_router_requests_total", _R, "outcome")},
              "Requests per second by how they ended.", "reqps"),
        Panel("Refused",
              {"{{reason}}": f"{_rate('baton_router_requests_refused_total', _R, 'reason')} "
               'or label_replace(vector(0), "reason", "none", "", "")'},
              "Requests per second that were refused before anything was computed.", "reqps"),
        Panel("Time to first token", _quantiles("baton_router_time_to_first_token_seconds", _R),
              "From arrival at the router.", "s"),
        Panel("Time between tokens", _quantiles("baton_router_inter_token_latency_seconds", _R),
              "Mean over a request's tokens.", "s"),
        Panel("Time to last token", _quantiles("baton_router_request_seconds", _R), "", "s"),
        Panel("Attempts per request",
              {"attempts": f"sum(rate(baton_router_attempts_total{{{_R}}}[$__rate_interval])) / "
               f'sum(rate(baton_router_requests_total{{outcome=~"stop|length|abort", {_R}}}'
               "[$__rate_interval]))"},
              "More than 1: nodes were lost, or short of memory."),
        Panel("Prompt lengths", _quantiles("baton_router_request_prompt_tokens", _R), "In tokens."),
        Panel("Output lengths", _quantiles("baton_router_request_output_tokens", _R), "In tokens."),
    ),
    "Where the time to the first token goes": (
        Panel("Queue", _quantiles("baton_router_queue_seconds", _R),
              "At the router and on the prefill node. Too few prefill nodes, or a burst.", "s"),
        Panel("Prefill", _quantiles("baton_router_prefill_seconds", _R),
              "From the first chunk to the first token.", "s"),
        Panel("Expected wait", {"{{instance}}": f"baton_router_expected_wait_seconds{{{_R}}}"},
              "For a request that comes now.", "s"),
        Panel("Decode", _quantiles("baton_router_decode_seconds", _R),
              "From the first to the last token.", "s"),
    ),
    "Router": (
        Panel("Nodes", {"{{role}} {{state}}": f"max by (role, state) (baton_router_nodes{{{_R}}})"},
              "By state."),
        Panel("Overload level", {"{{instance}}": f"baton_router_overload_level{{{_R}}}"},
              "1: less urgent requests are refused; 2: all requests are."),
        Panel("What the level follows",
              {"{{instance}} {{signal}}": f"baton_router_overload_signal{{{_R}}}"},
              "The event loop's lag in seconds; all others are shares of a limit."),
        Panel("Connections over HTTP",
              {"{{state}}": f"sum by (state) (baton_router_http_connections{{{_R}}})"},
              "Connections at work on a request, and connections that wait for one."),
    ),
}  # fmt: skip

HAND_OFF: Rows = {
    "Hand-off": (
        Panel("Exposed transfer", _quantiles("baton_router_exposed_transfer_seconds", _R),
              "From token 1 until the decode node has all KV: what a client can notice of it.",
              "s"),
        Panel("First step", _quantiles("baton_router_first_step_seconds", _R),
              "From the commit to the decode node's first token.", "s"),
        Panel("Transfers ended",
              {"{{role}} {{outcome}}": _rate("baton_transfers_ended_total", _N, "role, outcome")},
              "Per second. failed: the client got an error, or another attempt follows.", "ops"),
        Panel("Transfers open",
              {"{{role}} {{state}}": f"sum by (role, state) (baton_transfers{{{_N}}})"},
              "PARKED: waits for its prefill; DRAINING, QUARANTINED: ended, writes in flight."),
    ),
    "Transport": (
        Panel("Bandwidth of pairs",
              {"{{prefill_node}} {{decode_node}} {{transport}}":
               "max by (prefill_node, decode_node, transport) "
               f"(baton_router_pair_bandwidth_bytes_per_second{{{_R}}})"},
              "Measured when the nodes connected, by transport.", "Bps"),
        Panel("KV sent", {"{{node}}": _rate("baton_kv_sent_bytes_total", _N, "node")},
              "Repeated sends included.", "Bps"),
        Panel("KV received", {"{{node}}": _rate("baton_kv_received_bytes_total", _N, "node")},
              "Of committed transfers.", "Bps"),
        Panel("Bytes per descriptor",
              {"{{node}}": _ratio("baton_kv_sent_bytes_total", "baton_kv_descriptors_total")},
              "Size of one written memory range: larger is better.", "bytes"),
        Panel("Peers", {"{{node}} {{state}}": f"sum by (node, state) (baton_pairs{{{_N}}})"},
              "Peers of each node, by state."),
        Panel("Peers found silent", {"{{node}}": _rate("baton_peer_failures_total", _N, "node")},
              "Per second."),
    ),
    "Integrity": (
        Panel("Blocks quarantined", {"{{node}}": f"baton_blocks_quarantined{{{_N}}}"},
              "Blocks of ended requests that a peer may still write or read."),
        Panel("Blocks that arrived wrong",
              {"{{node}}": f"increase(baton_kv_wrong_blocks_total{{{_N}}}[1h])"},
              "In the last hour. No such block was used."),
        Panel("References without owner",
              {"{{node}}":
               f"baton_block_references{{{_N}}} - baton_block_references_owned{{{_N}}}"},
              "Not 0: blocks leak."),
    ),
}  # fmt: skip

NODES: Rows = {
    "Engine": (
        Panel("Requests", {"{{node}} {{state}}": f"baton_requests{{{_N}}}"},
              "parked: requests whose KV is on its way."),
        Panel("Tokens sampled", {"{{node}}": _rate("baton_output_tokens_total", _N, "node")},
              "/s."),
        Panel("Prompt tokens",
              {"{{node}} computed": _rate("baton_prompt_tokens_computed_total", _N, "node"),
               "{{node}} cached": _rate("baton_cached_prompt_tokens_total", _N, "node"),
               "{{node}} received": _rate("baton_received_prompt_tokens_total", _N, "node")},
              "Per second, by source of their KV."),
        Panel("Tokens per step", _quantiles("baton_step_tokens", _N),
              "Tokens of prompts and outputs: how full steps are."),
        Panel("Steps", {"{{node}}": _rate("baton_steps_total", _N, "node")}, "Per second.", "ops"),
        Panel("Seconds per step",
              {"{{node}} model and sampler":
               _ratio("baton_forward_seconds_total", "baton_steps_total"),
               "{{node}} whole": _ratio("baton_step_seconds_total", "baton_steps_total")},
              "The difference of the two is the host's work.", "s"),
        Panel("Model FLOP/s", {"{{node}}": _rate("baton_model_flops_total", _N, "node")},
              "From the model's configuration; divided by the devices' peak, this is MFU."),
        Panel("Memory read",
              {"{{node}} weights": _rate("baton_weight_read_bytes_total", _N, "node"),
               "{{node}} KV": _rate("baton_kv_read_bytes_total", _N, "node")},
              "Per second, from the model's configuration; compare with the memory's bandwidth.",
              "Bps"),
        Panel("MFU and share of bandwidth",
              {"{{node}} FLOPs": _share("baton_model_flops_total", "baton_device_peak_flops"),
               "{{node}} bandwidth":
               _share(("baton_weight_read_bytes_total", "baton_kv_read_bytes_total"),
                      "baton_device_peak_bandwidth")},
              "Of the peaks that --peak-flops and --peak-bandwidth tell; empty without them.",
              "percentunit"),
    ),
    "KV cache": (
        Panel("Blocks in use",
              {"{{node}}": f"1 - baton_blocks_free{{{_N}}} / baton_blocks{{{_N}}}"},
              "Share of all blocks. Cached prefixes without an owner are free.", "percentunit"),
        Panel("Blocks by owner", {"{{node}} {{owner}}": f"baton_blocks_held{{{_N}}}"},
              "References to blocks, by kind of owner."),
        Panel("Prefix cache hits",
              {"{{node}}":
               _ratio("baton_cached_prompt_tokens_total", "baton_prefix_lookup_tokens_total")},
              "Share of looked-up prompt tokens that were cached.", "percentunit"),
        Panel("Blocks cached", {"{{node}}": f"baton_blocks_cached{{{_N}}}"},
              "Blocks in the prefix cache."),
        Panel("Blocks evicted", {"{{node}}": _rate("baton_blocks_evicted_total", _N, "node")},
              "Per second: cached blocks that were given to other requests."),
        Panel("Preemptions", {"{{node}}": _rate("baton_preemptions_total", _N, "node")},
              "Requests per second that lost their blocks."),
    ),
    "KV residency": (
        Panel("Lifetime of cached blocks",
              _quantiles("baton_kv_block_lifetime_seconds", _N),
              "From entering the prefix cache to eviction.", "s"),
        Panel("Idle before eviction",
              _quantiles("baton_kv_block_idle_before_evict_seconds", _N),
              "From the last release to eviction. Shorter than the reuse gap: a larger cache "
              "would have more hits.", "s"),
        Panel("Reuse gap", _quantiles("baton_kv_block_reuse_gap_seconds", _N),
              "From the last release until a request took the block back.", "s"),
        Panel("Most blocks in use",
              {"{{node}}": f"baton_blocks_used_peak{{{_N}}} / baton_blocks{{{_N}}}"},
              "Since the node's start, as a share of all blocks.", "percentunit"),
        Panel("Unfilled slots",
              {"{{node}}":
               f"baton_kv_slots_unfilled{{{_N}}} / (baton_kv_slots_held{{{_N}}} > 0)"},
              "Share of the slots of requests' blocks that holds no token: internal waste.",
              "percentunit"),
        Panel("Preemptions by priority",
              {"{{priority}}": _rate("baton_preemptions_by_priority_total", _N, "priority")},
              "Per second, by the sign of the preempted request's priority."),
    ),
}  # fmt: skip

DASHBOARDS = {
    "fleet": ("Baton: fleet", FLEET),
    "hand_off": ("Baton: hand-off", HAND_OFF),
    "nodes": ("Baton: nodes", NODES),
}


def make(uid: str) -> str:
    """Return one dashboard as JSON."""
    title, rows = DASHBOARDS[uid]
    made = (
        dashboard.Dashboard(title)
        .uid(f"baton-{uid.replace('_', '-')}")
        .tags(["baton"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Source").type("prometheus"))
        .with_variable(_variable("router_job", "Routers", "baton_router_requests_open", "job"))
        .with_variable(_variable("role", "Role", "baton_uptime_seconds", "role"))
        .with_variable(_variable("node", "Node", "baton_uptime_seconds", "node"))
    )
    for row, panels in rows.items():
        made = made.with_row(dashboard.Row(row))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _variable(name: str, label: str, metric: str, of: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({metric}, {of})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .multi(True)
        .all_value(".*")
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    made: timeseries.Panel | stat.Panel
    if panel.is_number:
        calculate = common.ReduceDataOptions().calcs(["lastNotNull"])
        made = stat.Panel().reduce_options(calculate).height(4).span(6)
    else:
        legend = common.VizLegendOptions().show_legend(True)
        made = timeseries.Panel().legend(legend).min(0).height(8).span(12)
    made = made.title(panel.title).description(panel.says).unit(panel.unit).datasource(SOURCE)
    for index, (legend_format, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend_format)
        made = made.with_target(target.ref_id(chr(ord("A") + index)))
    return made


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries."""
    for title, rows in DASHBOARDS.values():
        for panels in rows.values():
            for panel in panels:
                for query in panel.queries.values():
                    yield f"{title}: {panel.title}", query


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them; else say which are old")
    options = parser.parse_args()
    old = []
    for uid in DASHBOARDS:
        path, text = FOLDER / f"{uid}.json", make(uid)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        old.append(path.name)
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if old and not options.write:
        print(f"old: {', '.join(old)}; run python -m tools.dashboards --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
