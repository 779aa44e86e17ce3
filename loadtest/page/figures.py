"""Draws the figures of a run from its result's JSON; `loadtest/report` computes the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.page.compare_figures import compare_figures
from loadtest.page.palette import Document, Look, make_logarithmic
from loadtest.page.step_figures import step_figures
from loadtest.report.series import AFTER_FIRST

# Latencies whose distributions are drawn, each with the name of its SLO limit (empty: none).
_CDFS = {
    "ttft_s": ("TTFT", "ttft"),
    "tpot_s": ("TPOT", "tpot"),
    "itl_s": ("ITL, per token", ""),
    "e2e_s": ("E2E", "e2e"),
}


def all_figures(document: Document, look: Look) -> dict[str, Figure]:
    """Draw all figures of a result; return those with any data, by name."""
    if document["kind"] == "compare":
        return compare_figures(document, look)
    if "steps" in document:
        return step_figures(document, look)
    series = document["series"]
    figures: dict[str, Figure] = {}
    if series["cdfs"]:
        figures["latency_cdfs"] = latency_cdfs(document, look)
    if series["timeline"]:
        figures["timeline"] = timeline(document, look)
    if series["waterfall"]:
        figures["receipt_waterfall"] = waterfall(document, look)
    return figures


def latency_cdfs(document: Document, look: Look) -> Figure:
    """Draw latency distributions: a panel per latency, because their ranges differ too much."""
    cdfs, latencies = document["series"]["cdfs"], document["summary"]["latencies"]
    limits = document["plan"]["slo"]
    figure, panels = look.panels(2, 2)
    for axes, name in zip(panels, _CDFS, strict=True):
        if name not in cdfs:
            axes.set_axis_off()
            continue
        title, limited = _CDFS[name]
        values_ms = [seconds * 1e3 for seconds, _ in cdfs[name]]
        shares = [100 * share for _, share in cdfs[name]]
        axes.step([values_ms[0], *values_ms], [0, *shares], where="post", color=look.blue)
        for percentile, (color, stroke) in zip(("p50", "p99"), look.lines[1:], strict=False):
            at_ms = latencies[name][percentile] * 1e3
            label = f"{percentile} {_ms(at_ms)}"
            axes.axvline(at_ms, color=color, linestyle=stroke, linewidth=1.2, label=label)
        marks_ms = [values_ms[0], values_ms[-1]]
        if limited in limits:
            limit_ms = limits[limited] * 1e3
            look.put_limit(axes, limit_ms, f"SLO {_ms(limit_ms)}", is_x=True)
            marks_ms.append(limit_ms)
        axes.set_title(title)
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of values at or below")
        axes.set_ylim(0, 101)
        if values_ms[0] > 0 and max(marks_ms) > 20 * min(marks_ms):
            make_logarithmic(axes, is_x=True)
        else:
            axes.set_xlim(0, max(marks_ms) * 1.05)
        look.put_legend(axes)
    return figure


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def timeline(document: Document, look: Look) -> Figure:
    """Draw throughput and latencies over time, one above the other; mark faults and warm-up."""
    series, summary, slo = document["series"], document["summary"], document["plan"]["slo"]
    bins, width_s = series["timeline"], series["bin_s"]
    times = [one["begin_s"] + width_s / 2 for one in bins]
    figure, panels = look.panels(3, 1)
    requests, tokens, latency = panels

    def line(axes: Axes, key: str, label: str, kind: int, scale: float = 1.0) -> None:
        values = [None if one[key] is None else one[key] * scale for one in bins]
        if any(value is not None for value in values):
            color, stroke = look.lines[kind]
            drawn: Any = [float("nan") if value is None else value for value in values]
            axes.plot(times, drawn, color=color, linestyle=stroke, label=label,
                      marker="." if len(bins) < 40 else "")  # fmt: skip

    line(requests, "ok_per_s", "ended well", 0)
    line(requests, "good_per_s", "of these within the SLO", 2)
    if any(one["failed_per_s"] for one in bins):
        line(requests, "failed_per_s", "failed", 1)
    line(tokens, "output_tokens_per_s", "output tokens", 0)
    line(latency, "ttft_p50_s", "TTFT p50", 0, 1e3)
    line(latency, "ttft_p99_s", "TTFT p99", 1, 1e3)
    line(latency, "frame_gap_p99_s", "gap between frames p99", 2, 1e3)
    for name, text in (("ttft", "SLO of TTFT"), ("gap", "SLO of the gap")):
        if name in slo:
            look.put_limit(latency, slo[name] * 1e3, f"{text} {_ms(slo[name] * 1e3)}")
    titles = (
        f"Requests per second (in bins of {width_s:g} s)", "Output tokens per second", "Latencies",
    )  # fmt: skip
    units = ("requests/s", "tokens/s", "milliseconds")
    for axes, title, unit in zip(panels, titles, units, strict=True):
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel("seconds since the run began")
        _mark_window(axes, summary["window_s"], times[-1] + width_s / 2, look)
        for fault in document.get("faults") or ():
            _mark_fault(axes, fault, look, with_label=axes is requests)
        axes.set_ylim(bottom=0)
        look.put_legend(axes)
    return figure


def _mark_window(axes: Axes, window_s: Sequence[float], end_s: float, look: Look) -> None:
    """Shade the time outside the measured window."""
    axes.set_xlim(0, end_s)
    label: str | None = "not measured"
    for begin_s, until_s in ((0, window_s[0]), (window_s[1], end_s)):
        if until_s > begin_s:
            axes.axvspan(begin_s, until_s, color=look.shade, zorder=0, label=label)
            label = None


def _mark_fault(axes: Axes, fault: Document, look: Look, with_label: bool) -> None:
    axes.axvspan(fault["began_s"], fault["ended_s"], color=look.orange, alpha=0.25, linewidth=0)
    axes.axvline(fault["began_s"], color=look.orange, linewidth=1.5)
    if with_label:
        axes.annotate(
            fault["text"], (fault["began_s"], 1.0), xycoords=("data", "axes fraction"),
            xytext=(2, -2), textcoords="offset points", va="top", rotation=90, fontsize=8,
            bbox={"facecolor": look.paper, "edgecolor": "none", "pad": 0.5, "alpha": 0.7},
        )  # fmt: skip


def waterfall(document: Document, look: Look) -> Figure:
    """Draw the stages of the mean request up to token 1, and those of the whole mean request."""
    stages = document["series"]["waterfall"]
    first = [stage for stage in stages if stage["latency"] != AFTER_FIRST]
    after = [stage for stage in stages if stage["latency"] == AFTER_FIRST]
    until_first = {
        "name": "to the first token", "begin_s": 0.0, "overlaps": False,
        "seconds": after[0]["begin_s"] if after else 0.0,
    }  # fmt: skip
    groups = [group for group in (first, [until_first, *after] if after else []) if group]
    figure = look.figure(0.25 + 0.17 * sum(len(group) + 2 for group in groups))
    panels = figure.subplots(
        len(groups), 1, squeeze=False, height_ratios=[len(group) + 0.5 for group in groups]
    )
    titles = ("The mean request to its first token", "As a whole")
    for (axes,), group, title in zip(panels, groups, titles, strict=False):
        _bars(axes, group, look)
        axes.set_title(title)
        axes.set_xlabel("ms since the router had the request")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2)
    return figure


def _bars(axes: Axes, stages: Sequence[Document], look: Look) -> None:
    places = range(len(stages))
    for overlaps in (False, True):
        chosen = [i for i in places if stages[i]["overlaps"] is overlaps]
        if chosen:
            axes.barh(
                chosen,
                [stages[i]["seconds"] * 1e3 for i in chosen],
                left=[stages[i]["begin_s"] * 1e3 for i in chosen],
                color=look.orange if overlaps else look.blue,
                hatch="//" if overlaps else None,
                edgecolor=look.paper,
                label="runs beside others" if overlaps else "one after the other",
            )
    ends_ms = [(stage["begin_s"] + stage["seconds"]) * 1e3 for stage in stages]
    for place, stage, end_ms in zip(places, stages, ends_ms, strict=True):
        axes.text(end_ms, place, f" {_ms(stage['seconds'] * 1e3)}", va="center", fontsize=8)
    axes.set_yticks(list(places), [stage["name"] for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, max(ends_ms) * (1.35 if look.is_narrow else 1.15))
    axes.grid(axis="y", visible=False)
