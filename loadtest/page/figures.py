"""Figures of a result's JSON: what a number is, was decided before; here it only gets a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.page.compare_figures import compare_figures
from loadtest.page.palette import BLUE, LINES, ORANGE, WIDTH_INCHES, Document, put_legend
from loadtest.page.step_figures import step_figures
from loadtest.series import AFTER_FIRST

_CDFS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL, per token", "e2e_s": "E2E"}


def all_figures(document: Document) -> dict[str, Figure]:
    """Of a result, by name; only those that there are numbers for."""
    if document["kind"] == "compare":
        return compare_figures(document)
    if "steps" in document:
        return step_figures(document)
    series = document["series"]
    figures: dict[str, Figure] = {}
    if series["cdfs"]:
        figures["latency_cdfs"] = latency_cdfs(series["cdfs"], document["summary"]["latencies"])
    if series["timeline"]:
        figures["timeline"] = timeline(document)
    if series["waterfall"]:
        figures["receipt_waterfall"] = waterfall(series["waterfall"])
    return figures


def latency_cdfs(cdfs: dict[str, list[tuple[float, float]]], latencies: Document) -> Figure:
    """A panel for each kind of latency: they differ too much for one axis."""
    shown = [name for name in _CDFS if name in cdfs]
    figure = Figure(figsize=(WIDTH_INCHES, 5.4), layout="constrained")
    for index, name in enumerate(shown):
        axes = figure.add_subplot(2, 2, index + 1)
        values_ms = [seconds * 1e3 for seconds, _ in cdfs[name]]
        shares = [100 * share for _, share in cdfs[name]]
        axes.step([values_ms[0], *values_ms], [0, *shares], where="post", color=BLUE)
        title = _CDFS[name]
        for percentile, (color, stroke) in zip(("p50", "p99"), LINES[1:], strict=False):
            at_ms = latencies[name][percentile] * 1e3
            axes.axvline(at_ms, color=color, linestyle=stroke, linewidth=1.2)
            title += f"   {percentile} {_ms(at_ms)}"
        axes.set_title(title)
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("% of values at or below")
        axes.set_ylim(0, 101)
        if values_ms[0] > 0 and values_ms[-1] > 20 * values_ms[0]:
            axes.set_xscale("log")
    return figure


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def timeline(document: Document) -> Figure:
    """Throughput above, latencies below, over the time of the run; faults and warm-up marked."""
    series, summary = document["series"], document["summary"]
    bins, width_s = series["timeline"], series["bin_s"]
    times = [one["begin_s"] + width_s / 2 for one in bins]
    figure = Figure(figsize=(WIDTH_INCHES, 6.6), layout="constrained")
    requests, tokens, latency = figure.subplots(3, 1, sharex=True)

    def line(axes: Axes, key: str, label: str, kind: int, scale: float = 1.0) -> None:
        values = [None if one[key] is None else one[key] * scale for one in bins]
        if any(value is not None for value in values):
            color, stroke = LINES[kind]
            drawn: Any = [float("nan") if value is None else value for value in values]
            axes.plot(times, drawn, color=color, linestyle=stroke, label=label,
                      marker="." if len(bins) < 40 else "")  # fmt: skip

    line(requests, "ok_per_s", "ended well", 0)
    line(requests, "good_per_s", "within the SLO", 2)
    if any(one["failed_per_s"] for one in bins):
        line(requests, "failed_per_s", "failed", 1)
    line(tokens, "output_tokens_per_s", "output tokens", 0)
    line(latency, "ttft_p50_s", "TTFT p50", 0, 1e3)
    line(latency, "ttft_p99_s", "TTFT p99", 1, 1e3)
    line(latency, "frame_gap_p99_s", "gap between frames p99", 2, 1e3)
    titles = (
        f"Requests per second (in bins of {width_s:g} s)", "Output tokens per second", "Latencies",
    )  # fmt: skip
    units = ("requests/s", "tokens/s", "milliseconds")
    for axes, title, unit in zip((requests, tokens, latency), titles, units, strict=True):
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        _mark_window(axes, summary["window_s"], times[-1] + width_s / 2)
        for fault in document.get("faults") or ():
            _mark_fault(axes, fault, with_label=axes is requests)
        if axes is not tokens:
            put_legend(axes)
    latency.set_xlabel("seconds since the run began")
    return figure


def _mark_window(axes: Axes, window_s: Sequence[float], end_s: float) -> None:
    """What is not measured is grey."""
    axes.set_xlim(0, end_s)
    for begin_s, until_s in ((0, window_s[0]), (window_s[1], end_s)):
        if until_s > begin_s:
            axes.axvspan(begin_s, until_s, color="#eeeeee", zorder=0)


def _mark_fault(axes: Axes, fault: Document, with_label: bool) -> None:
    axes.axvspan(fault["began_s"], fault["ended_s"], color=ORANGE, alpha=0.25, linewidth=0)
    axes.axvline(fault["began_s"], color=ORANGE, linewidth=1.5)
    if with_label:
        axes.annotate(
            fault["text"], (fault["began_s"], 1.0), xycoords=("data", "axes fraction"),
            xytext=(2, -2), textcoords="offset points", va="top", rotation=90, fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7},
        )  # fmt: skip


def waterfall(stages: Sequence[Document]) -> Figure:
    """Stages of the mean request, one below the other; medians beside them as marks."""
    figure = Figure(figsize=(WIDTH_INCHES, 1.3 + 0.38 * len(stages)), layout="constrained")
    axes = figure.subplots()
    places = range(len(stages))
    for overlaps in (False, True):
        chosen = [i for i in places if stages[i]["overlaps"] is overlaps]
        if chosen:
            axes.barh(
                chosen,
                [stages[i]["mean_s"] * 1e3 for i in chosen],
                left=[stages[i]["begin_mean_s"] * 1e3 for i in chosen],
                color=ORANGE if overlaps else BLUE,
                hatch="//" if overlaps else None,
                edgecolor="white",
                label="runs beside others" if overlaps else "one after the other",
            )
    # The tokens after the first take as long as the output is: they may leave the picture.
    ends_ms = [(stage["begin_mean_s"] + stage["mean_s"]) * 1e3 for stage in stages]
    others = [ms for ms, stage in zip(ends_ms, stages, strict=True) if stage["name"] != AFTER_FIRST]
    limit_ms = min(max(ends_ms), 2 * max(others, default=max(ends_ms)))
    for place, stage, end_ms in zip(places, stages, ends_ms, strict=True):
        text = f" {stage['mean_s'] * 1e3:,.1f} (median {stage['median_s'] * 1e3:,.1f})"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if end_ms > limit_ms else None
        axes.text(min(end_ms, limit_ms), place, text, va="center", fontsize=8, bbox=box)
    axes.set_yticks(list(places), [stage["name"] for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, limit_ms * 1.28)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds since the router had the request; numbers: mean (median)")
    axes.set_title("Receipt: where a request's time went, on the mean")
    figure.legend(loc="outside lower right", ncols=2)
    return figure
