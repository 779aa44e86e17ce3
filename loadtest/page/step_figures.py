"""Figures of runs that were played one after the other: sweeps, and the search for a rate."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.page.palette import (
    BLUE,
    GREEN,
    LINES,
    ORANGE,
    RED,
    WIDTH_INCHES,
    Document,
    put_legend,
)

_LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL, per token"}
_MARKERS = "os^Dv<>pPX"


def step_figures(document: Document) -> dict[str, Figure]:
    """By name."""
    steps = [step for step in document["steps"] if step["summary"]["latencies"]]
    figures: dict[str, Figure] = {}
    if document["kind"] == "search" and document["steps"]:
        figures["search"] = search_figure(document)
    if steps:
        figures["throughput_latency"] = throughput_latency(steps, document["variable"])
        figures["throughput"] = throughput(steps, document["variable"])
    return figures


def throughput_latency(steps: Sequence[Document], variable: str) -> Figure:
    """The curve: what a latency costs, or buys, in tokens per second."""
    figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
    for index, (name, title) in enumerate(_LATENCIES.items()):
        axes = figure.add_subplot(1, 2, index + 1)
        shown = sorted(
            (step for step in steps if name in step["summary"]["latencies"]),
            key=lambda step: float(step["value"]),
        )
        tokens = [step["summary"]["output_tokens_per_s"] for step in shown]
        tops_ms: list[float] = []
        for percentile, (color, stroke) in zip(("p50", "p99"), LINES, strict=False):
            tops_ms = [step["summary"]["latencies"][name][percentile] * 1e3 for step in shown]
            axes.plot(tokens, tops_ms, color=color, linestyle=stroke, marker="o", label=percentile)
        _label_points(axes, tokens, tops_ms, [f"{step['value']:g}" for step in shown])
        axes.set_title(title)
        axes.set_xlabel(f"output tokens/s (beside the points: {variable})")
        axes.set_ylabel("milliseconds")
        axes.set_yscale("log")
        axes.margins(x=0.1, y=0.15)
        put_legend(axes)
    return figure


def _label_points(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], labels: Sequence[str]
) -> None:
    for x, y, label in zip(xs, ys, labels, strict=True):
        axes.annotate(label, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=8)


def throughput(steps: Sequence[Document], variable: str) -> Figure:
    """What came out over what was asked for."""
    figure = Figure(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
    axes = figure.subplots()
    shown = sorted(steps, key=lambda step: float(step["value"]))
    values = [step["value"] for step in shown]
    kinds = {"requests_per_s": "ended well", "goodput_per_s": "within the SLO (goodput)"}
    for (key, label), (color, stroke) in zip(kinds.items(), LINES, strict=False):
        found = [step["summary"][key] for step in shown]
        if None not in found:
            axes.plot(values, found, color=color, linestyle=stroke, marker="o", label=label)
    if variable == "rate":
        axes.plot(values, values, color="#777777", linestyle=":", label="asked for")
    axes.set_title("Throughput")
    axes.set_xlabel("requests/s asked for" if variable == "rate" else "users")
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    put_legend(axes)
    return figure


def search_figure(document: Document) -> Figure:
    """Every try: its rate, the share that it attained, and whether it held."""
    search = document["search"]
    figure = Figure(figsize=(WIDTH_INCHES, 3.4), layout="constrained")
    axes = figure.subplots()
    for held, color in ((True, BLUE), (False, RED)):
        for repeat in sorted({step["repeat"] for step in document["steps"]}):
            chosen = [
                step
                for step in document["steps"]
                if (step["repeat"], step["held"]) == (repeat, held)
                and step["summary"]["attainment"] is not None
            ]
            axes.plot(
                [step["value"] for step in chosen],
                [100 * step["summary"]["attainment"] for step in chosen],
                linestyle="", marker=_MARKERS[repeat % len(_MARKERS)], color=color,
                fillstyle="full" if held else "none",
                label=("held" if held else "failed") if repeat == 0 else None,
            )  # fmt: skip
    axes.axhline(100 * search["attainment"], color=GREEN, linestyle="-.", label="to be held")
    found = search["max_rate_per_s"]
    if found is not None:
        axes.axvline(found["mean"], color=ORANGE, linewidth=1.5, label="highest rate")
        if found["low"] is not None:
            axes.axvspan(found["low"], found["high"], color=ORANGE, alpha=0.2, linewidth=0)
    axes.set_title("Search (shapes: repeats)")
    axes.set_xlabel("requests/s (shaded: 95 % confidence interval)")
    axes.set_ylabel("% of requests within the SLO")
    axes.set_ylim(-3, 105)
    put_legend(axes)
    return figure
