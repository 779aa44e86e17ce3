"""Figures of a sweep, and of a search for the highest rate."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.page.palette import Document, Look, make_logarithmic

# Latencies to draw, each with the name of its SLO limit (empty: none).
_LATENCIES = {
    "ttft_s": ("TTFT", "ttft"),
    "tpot_s": ("TPOT", "tpot"),
    "itl_s": ("ITL, per token", ""),
    "e2e_s": ("E2E", "e2e"),
}
_MARKERS = "os^Dv<>pPX"


def step_figures(document: Document, look: Look) -> dict[str, Figure]:
    """Draw all figures of a sweep or search; return the figures by name."""
    steps = [step for step in document["steps"] if step["summary"]["latencies"]]
    steps.sort(key=lambda step: float(step["value"]))
    figures: dict[str, Figure] = {}
    if document["kind"] == "search" and document["steps"]:
        figures["search"] = search_figure(document, look)
    if steps:
        slo = document["plan"]["slo"]
        figures["throughput_latency"] = throughput_latency(steps, document["variable"], slo, look)
        figures["throughput"] = throughput(steps, document["variable"], look)
    return figures


def throughput_latency(
    steps: Sequence[Document], variable: str, slo: dict[str, float], look: Look
) -> Figure:
    """Draw latencies against tokens per second, with one point per step."""
    figure, panels = look.panels(2, 2)
    for axes, (name, (title, limited)) in zip(panels, _LATENCIES.items(), strict=True):
        shown = [step for step in steps if name in step["summary"]["latencies"]]
        if not shown:
            axes.set_axis_off()
            continue
        tokens = [step["summary"]["output_tokens_per_s"] for step in shown]
        tops_ms: list[float] = []
        for percentile, (color, stroke) in zip(("p50", "p99"), look.lines, strict=False):
            tops_ms = [step["summary"]["latencies"][name][percentile] * 1e3 for step in shown]
            axes.plot(tokens, tops_ms, color=color, linestyle=stroke, marker="o", label=percentile)
        _label_points(axes, tokens, tops_ms, [f"{step['value']:.3g}" for step in shown])
        if limited in slo:
            look.put_limit(axes, slo[limited] * 1e3, f"SLO {slo[limited] * 1e3:g} ms")
        axes.set_title(title)
        axes.set_xlabel(f"output tokens/s (beside the points: {variable})")
        axes.set_ylabel("milliseconds")
        make_logarithmic(axes, is_x=False)
        axes.margins(x=0.1, y=0.15)
        axes.set_xlim(left=0)
        look.put_legend(axes)
    return figure


def _label_points(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], labels: Sequence[str]
) -> None:
    for x, y, label in zip(xs, ys, labels, strict=True):
        axes.annotate(label, (x, y), xytext=(4, 5), textcoords="offset points", fontsize=8)


def throughput(steps: Sequence[Document], variable: str, look: Look) -> Figure:
    """Draw the steps' achieved rates against their requested rates."""
    figure, (axes,) = look.panels(1, 1)
    values = [step["value"] for step in steps]
    kinds = {"requests_per_s": "ended well", "goodput_per_s": "within the SLO (goodput)"}
    for (key, label), (color, stroke) in zip(kinds.items(), look.lines, strict=False):
        found = [step["summary"][key] for step in steps]
        if None not in found:
            axes.plot(values, found, color=color, linestyle=stroke, marker="o", label=label)
    if variable == "rate":
        asked = [step["summary"]["asked_per_s"] for step in steps]
        axes.plot(values, asked, color=look.ink, linestyle=":", alpha=0.6, label="asked for")
    axes.set_title("Throughput")
    axes.set_xlabel("requests/s asked for" if variable == "rate" else "users")
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    look.put_legend(axes)
    return figure


def search_figure(document: Document, look: Look) -> Figure:
    """Draw all steps of a search: rate, share within the SLO, and whether the rate held."""
    search = document["search"]
    figure, (axes,) = look.panels(1, 1)
    for held, color in ((True, look.blue), (False, look.red)):
        is_named = False
        for repeat in sorted({step["repeat"] for step in document["steps"]}):
            chosen = [
                step
                for step in document["steps"]
                if (step["repeat"], step["held"]) == (repeat, held)
                and step["summary"]["attainment"] is not None
            ]
            if not chosen:
                continue
            axes.plot(
                [step["value"] for step in chosen],
                [100 * step["summary"]["attainment"] for step in chosen],
                linestyle="", marker=_MARKERS[repeat % len(_MARKERS)], color=color,
                fillstyle="full" if held else "none",
                label=None if is_named else "held" if held else "failed",
            )  # fmt: skip
            is_named = True
    axes.axhline(100 * search["attainment"], color=look.green, linestyle="-.", label="to be held")
    found = search["max_rate_per_s"]
    if found is not None:
        axes.axvline(found["mean"], color=look.orange, linewidth=1.5, label="highest rate")
        if found["low"] is not None:
            axes.axvspan(
                found["low"], found["high"], color=look.orange, alpha=0.2, linewidth=0,
                label="95 % interval",
            )  # fmt: skip
    axes.set_title("Search (shapes: repeats)")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("% of requests within the SLO")
    axes.set_ylim(-3, 105)
    axes.set_xlim(left=0)
    look.put_legend(axes)
    return figure
